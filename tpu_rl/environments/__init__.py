"""Environments: programs that a model talks to, and tasks that need no data files.

contract        the methods of a class that is an environment
named           environments by name: built in, of a file, or of another package
pool            the worker processes that environments live in
worker_process  what runs in such a process
observations    what an environment answers: texts and pictures
tool_schemas    methods as descriptions of tools
task            the type of a task, and the text of a completion
answer_text     the part of a completion that states its answer
answers         numbers in texts

`tpu_rl.tasks` has those that come with the library.
"""

from typing import TYPE_CHECKING

from tpu_rl import lazy

if TYPE_CHECKING:
    from tpu_rl.environments.task import Task, task_of, text_of

lazy.exports(__name__, __file__)
