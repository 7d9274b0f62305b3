"""Run model-written programs where they can do no harm.

processes   starts confined processes, and reads what they print within limits
child       what such a process does: it confines itself, then runs the program
channel     the calls of plain values between a test and the program
unit_tests  tests of programs, and their verdicts
"""

from tpu_rl.sandbox.processes import Outcome as Outcome
from tpu_rl.sandbox.processes import Refused as Refused
from tpu_rl.sandbox.processes import SandboxLimits as SandboxLimits
from tpu_rl.sandbox.processes import judge as judge
from tpu_rl.sandbox.processes import refusal as refusal
from tpu_rl.sandbox.processes import require as require
from tpu_rl.sandbox.processes import run as run
