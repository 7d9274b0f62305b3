"""A reward and an agent for the offline twins of docs/first_tasks."""


def score(completions: list[str], answer: list[str], **columns: list) -> list[float]:
    """Reward completions that end with the right number."""
    return [
        float(text.endswith(f"#{truth}")) for text, truth in zip(completions, answer, strict=True)
    ]


async def run(row: dict, base_url: str, api_key: str) -> float:
    """Ask once, and once more after a wrong answer."""
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    for reward in (1.0, 0.5):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=12
        )
        message = answer.choices[0].message
        if str(message.content).endswith(f"#{row['answer']}"):
            return reward
        messages += [message, {"role": "user", "content": row["prompt"]}]
    return 0.0
