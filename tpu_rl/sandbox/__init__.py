"""Run model-written programs where they can do no harm.

processes   starts confined processes, and reads what they print within limits
child       what such a process does: it confines itself, then runs the program
channel     the values and calls between a test and the program
machine     a confined computer for shell commands; machine_end is the process in it
program_end, judge_end  the two processes that it connects
unit_tests  tests of programs, and their verdicts
problems    rows of published data sets, and the code in their prompts
"""

from tpu_rl.sandbox.machine import CommandResult, Machine, MachineLost
from tpu_rl.sandbox.processes import Outcome, Refused, SandboxLimits, judge, refusal, require, run
