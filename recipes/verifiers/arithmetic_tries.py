"""An environment of verifiers v1: calculate an expression in at most two tries.

The user asks an expression, and asks it again if the answer is wrong. The right result earns 1 in
the first try and 0.5 in the second. This module needs verifiers and nothing of tpu_rl.
"""

import random

import httpx
import verifiers.v1 as vf

CLIENT = httpx.AsyncClient(timeout=None)
"""To make one for each request would take longer than the request."""
TRIES = 2
TERMS = 4


class ArithmeticData(vf.TaskData):
    """An expression, and its value."""

    answer: str


class ArithmeticTask(vf.Task[ArithmeticData, vf.State, vf.TaskConfig]):
    """Every reward is recorded by the environment."""


class ArithmeticConfig(vf.TasksetConfig):
    """The size of the taskset."""

    size: int = 2000


class ArithmeticTaskset(vf.Taskset[ArithmeticTask, ArithmeticConfig]):
    """Random expressions."""

    def load(self):
        """Yield the tasks."""
        draw = random.Random(0)
        for _ in range(self.config.size):
            expression = str(draw.randint(0, 9))
            for _ in range(TERMS - 1):
                expression += draw.choice("+-*") + str(draw.randint(0, 9))
            data = ArithmeticData(prompt=f"{expression}=", answer=str(eval(expression)))
            yield ArithmeticTask(data, self.config.task)


class AskHarnessConfig(vf.HarnessConfig):
    """Nothing to set."""


class AskHarness(vf.Harness[AskHarnessConfig]):
    """A harness that sends the conversation, and takes the answer as it is."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        """Ask the model once."""
        prompt = data.prompt
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = [{"role": m.role, "content": m.content} for m in prompt]
        response = await CLIENT.post(
            f"{endpoint}/chat/completions",
            json={"model": ctx.model, "messages": messages},
            headers={"Authorization": f"Bearer {secret}"},
        )
        text = response.text
        if response.is_success:
            text = response.json()["choices"][0]["message"]["content"]
        return vf.ProgramResult(0 if response.is_success else 1, text, "")


class ArithmeticEnvConfig(vf.EnvConfig):
    """The one who calculates. The harness runs in this process's own system."""

    solver: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class ArithmeticEnv(vf.Env[ArithmeticEnvConfig]):
    """The conversation."""

    async def run(self, task, agents):
        """Ask until the answer is right, or the tries are used up."""
        reward = 0.0
        async with agents.solver.interaction(task) as interaction:
            segment = await interaction.turn()
            for number in range(TRIES):
                if segment.last_reply.endswith(f"#{task.data.answer}"):
                    reward = 1.0 / 2**number
                    break
                if segment.terminated or number == TRIES - 1:
                    break
                segment = await interaction.turn(task.data.prompt)
        interaction.trace.record_reward("right", reward)


__all__ = ["ArithmeticEnv", "ArithmeticTaskset", "AskHarness"]
