"""The everyday calls of the official `openai` client against a running endpoint.

    python tests/python/openai_client.py http://127.0.0.1:8080/v1

Prints one line a check and exits with 1 on the first that fails.
"""

import json
import sys

import openai
from openai import OpenAI

MODEL = "hearth-demo"
VOCABULARY = 2048
END = "1"
QUESTION = [{"role": "user", "content": "What is Hearth?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bonn", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def models(client):
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert "Hearth" in answer.choices[0].message.content, answer
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
    return answer.choices[0].message.content


def chat_stream(client):
    whole = chat(client)
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, reason, usage = "", None, None
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        usage = chunk.usage or usage
    assert text == whole, (text, whole)
    assert reason == "stop" and usage.completion_tokens > 0


def several_choices(client):
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, temperature=1.5, seed=5, max_tokens=20)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    again = client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, temperature=1.5, seed=5, max_tokens=20)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]


def stop_and_length(client):
    short = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=3)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3
    whole = chat(client)
    word = whole.split()[2]
    stopped = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == whole[: whole.index(word)]


def logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    for token in content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert token.token == token.top_logprobs[0].token, "greedy takes the likeliest"


def completions(client):
    answer = client.completions.create(model=MODEL, prompt="Hearth is", max_tokens=8, temperature=0)
    assert answer.choices[0].text and answer.usage.completion_tokens <= 8
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(model=MODEL, prompt="Hearth is", max_tokens=8, temperature=0, stream=True)
        if chunk.choices
    )
    assert text == answer.choices[0].text
    two = client.completions.create(model=MODEL, prompt=["Hearth is", "Kubernetes is"], max_tokens=4, temperature=0)
    assert len(two.choices) == 2


def structured(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=200,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "node",
                "strict": True,
                "schema": {
                    "type": "object",
                    "properties": {"role": {"enum": ["prefill", "decode"]}, "cores": {"type": "integer", "minimum": 1, "maximum": 9}},
                    "required": ["role", "cores"],
                    "additionalProperties": False,
                },
            },
        },
    )
    value = json.loads(answer.choices[0].message.content)
    assert value["role"] in ("prefill", "decode") and 1 <= value["cores"] <= 9, value


def tools(client):
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=200
        )
        call = answer.choices[0].message.tool_calls[0]
        assert answer.choices[0].finish_reason == "tool_calls", answer
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Bonn", "Rome"), call
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=200, stream=True
    )
    name, arguments = "", ""
    for chunk in stream:
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "get_weather" and json.loads(arguments)["city"] in ("Bonn", "Rome"), (name, arguments)


def refusals(client):
    cases = [
        (openai.NotFoundError, dict(model="no-such-model", messages=QUESTION), MODEL),
        (openai.BadRequestError, dict(model=MODEL, messages=QUESTION, temperature=9), "temperature"),
        (openai.BadRequestError, dict(model=MODEL, messages=QUESTION, max_tokens=0), "max_tokens"),
        (openai.BadRequestError, dict(model=MODEL, messages=QUESTION, extra_body={"frobnicate": 1}), "frobnicate"),
        (openai.BadRequestError, dict(model=MODEL, messages=[]), "messages"),
        (openai.BadRequestError, dict(model=MODEL, messages=[{"role": "user", "content": "word " * 20000}]), "context"),
    ]
    for kind, arguments, expected in cases:
        try:
            client.chat.completions.create(**arguments)
        except kind as error:
            assert expected in str(error), (expected, str(error))
        else:
            raise AssertionError(f"{expected} was not refused")


def sampling(client):
    greedy = chat(client)
    for arguments in (
        dict(temperature=1.0, top_p=0.000001),
        dict(temperature=1.0, extra_body={"top_k": 1}),
        dict(temperature=1.0, extra_body={"min_p": 1.0}),
    ):
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, **arguments)
        assert answer.choices[0].message.content == greedy, arguments


def first_token(client, **arguments):
    """The first token of a greedy answer, with its alternatives."""
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=1, logprobs=True, top_logprobs=2, **arguments
    )
    return answer.choices[0].logprobs.content[0]


def token_id(client, token):
    """The id of the token that a greedy answer begins with: halves of the vocabulary are banned until one id is left."""
    ids = range(VOCABULARY)
    while len(ids) > 1:
        half = ids[: min(len(ids) // 2, 256)]
        is_banned = first_token(client, logit_bias={str(id): -100 for id in half}).token != token
        ids = half if is_banned else ids[len(half) :]
    return ids[0]


def logit_bias(client):
    plain = first_token(client)
    best, second = (alternative.token for alternative in plain.top_logprobs)
    assert plain.token == best != second
    id = token_id(client, best)
    banned = first_token(client, logit_bias={str(id): -100})
    assert banned.token == second, "a ban leaves the second best"
    # And a bias the other way makes any answer of that token alone.
    wanted = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is a KV cache?"}], temperature=1, seed=3,
        max_tokens=4, logprobs=True, logit_bias={str(id): 100},
    )
    assert [token.token for token in wanted.choices[0].logprobs.content] == [best] * 4, wanted


def penalties(client):
    def distinct(**arguments):
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "ring ring ring ring"}], temperature=0, max_tokens=200,
            logprobs=True, logit_bias={END: -100}, **arguments,
        )
        tokens = [token.token for token in answer.choices[0].logprobs.content]
        assert len(tokens) == 200
        return len(set(tokens))

    plain = distinct()
    for name in ("frequency_penalty", "presence_penalty"):
        weak, strong = distinct(**{name: 0.5}), distinct(**{name: 2.0})
        assert strong > plain + 10 and strong >= weak, (name, plain, weak, strong)
        encouraged = distinct(**{name: -2.0})
        assert encouraged < plain, (name, plain, encouraged)


def streamed_logprobs(client):
    arguments = dict(model=MODEL, messages=QUESTION, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3)
    whole = client.chat.completions.create(**arguments).choices[0].logprobs.content
    streamed = [
        token
        for chunk in client.chat.completions.create(stream=True, **arguments)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert streamed == whole
    assert all(len(token.top_logprobs) == 3 for token in streamed)


def streamed_choices(client):
    arguments = dict(model=MODEL, messages=QUESTION, n=3, temperature=1.5, seed=5, max_tokens=20)
    whole = client.chat.completions.create(**arguments)
    texts, reasons, usage = [""] * 3, [None] * 3, None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **arguments):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def tools_by_choice(client):
    """The model sees the tools and decides; it is small and may not call one."""
    arguments = dict(model=MODEL, messages=QUESTION, temperature=0, max_tokens=60)
    plain = client.chat.completions.create(**arguments)
    for more in (dict(), dict(tool_choice="auto")):
        answer = client.chat.completions.create(tools=[WEATHER], **more, **arguments)
        assert answer.usage.prompt_tokens > plain.usage.prompt_tokens, "the prompt does not show the tools"
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        assert (reason == "tool_calls") == bool(message.tool_calls)
        assert message.content or message.tool_calls, answer
    without = client.chat.completions.create(tools=[WEATHER], tool_choice="none", **arguments)
    assert without.usage.prompt_tokens == plain.usage.prompt_tokens
    assert without.choices[0].message.content == plain.choices[0].message.content
    called = client.chat.completions.create(tools=[WEATHER], tool_choice="required", **{**arguments, "max_tokens": 200})
    call = called.choices[0].message.tool_calls[0]
    after = client.chat.completions.create(
        model=MODEL,
        messages=[
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude_none=True)]},
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
        ],
        tools=[WEATHER],
        temperature=0,
        max_tokens=20,
    )
    assert after.usage.prompt_tokens > called.usage.prompt_tokens


def conversation(client):
    first = chat(client)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Answer briefly."},
            *QUESTION,
            {"role": "assistant", "content": first},
            {"role": "user", "content": [{"type": "text", "text": "What is a KV cache?"}]},
        ],
        temperature=0,
        max_tokens=60,
    )
    assert answer.choices[0].message.content


CHECKS = [
    models,
    chat,
    chat_stream,
    several_choices,
    streamed_choices,
    stop_and_length,
    logprobs,
    streamed_logprobs,
    completions,
    structured,
    tools,
    tools_by_choice,
    refusals,
    sampling,
    logit_bias,
    penalties,
    conversation,
]


def main():
    client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
    for check in CHECKS:
        check(client)
        print(f"ok {check.__name__}", flush=True)
    print(f"{len(CHECKS)} checks hold for openai {openai.__version__}")


if __name__ == "__main__":
    main()
