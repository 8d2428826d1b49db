"""Agents of twelve libraries that ask a question of the model at a base URL, to be recorded by `contrib.record`.

None knows anything of reasonrag: each has its own loop, its own prompts, and a function `search`.
`tests/peers/check_agents.py` records all of them and branches what is recorded.

    from examples.agents import smolagents
    smolagents("http://127.0.0.1:8020/v1", "Who directed Jaws?")
"""

from __future__ import annotations

import asyncio
from typing import Any

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
FUNCTION = {"name": "search", "description": "Search the encyclopedia.", "parameters": SCHEMA}
MODEL = "fake"


def search(query: str) -> str:
    """Search the encyclopedia.

    Args:
        query: what to look for
    """
    return f"FOUND: a passage about {query}"  # yours


def openai_responses(base_url: str, question: str, *, stream: bool = False, keeps: bool = True) -> None:
    """Send all items each time, or, without `keeps`, those that are new with the id of the last response."""
    import openai

    client, tool = openai.OpenAI(base_url=base_url), {"type": "function", **FUNCTION}
    said: list[Any] = [{"role": "user", "content": question}]
    asked: dict[str, Any] = {"model": MODEL, "instructions": "Search.", "tools": [tool], "stream": stream}
    while True:
        reply = client.responses.create(input=said, **asked)
        response = [event for event in reply if event.type == "response.completed"][-1].response if stream else reply
        results = []
        for call in response.output:
            if call.type == "function_call":
                result = search(call.arguments)
                results.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not results:
            return
        said = [*said, *response.output, *results] if keeps else results
        asked |= {} if keeps else {"previous_response_id": response.id}


def anthropic(base_url: str, question: str, *, stream: bool = False) -> None:
    """Its client adds `/v1` to the base URL."""
    import anthropic as library

    client = library.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="k")
    tool = {"name": "search", "description": "Search the encyclopedia.", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 99, "system": "Search.", "tools": [tool]}
    asked["messages"] = [{"role": "user", "content": question}]
    while True:
        if stream:
            with client.messages.stream(**asked) as streamed:
                reply = streamed.get_final_message()
        else:
            reply = client.messages.create(**asked)
        results = []
        for block in reply.content:
            if block.type == "tool_use":
                found = search(str(block.input["query"]))
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": found})
        if not results:
            return
        asked["messages"] += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]


def openai_agents(base_url: str, question: str, *, chat: bool = False) -> None:
    """Ask for responses, its default, or for chat completions."""
    import agents
    import openai

    make = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    model = make(model=MODEL, openai_client=openai.AsyncOpenAI(base_url=base_url))
    agent = agents.Agent(name="a", instructions="Search.", tools=[agents.function_tool(search)], model=model)
    asyncio.run(agents.Runner.run(agent, question))


def litellm(base_url: str, question: str) -> None:
    """Ask by its one function, in a loop of yours."""
    from litellm import completion

    messages: list[Any] = [{"role": "user", "content": question}]
    tools = [{"type": "function", "function": FUNCTION}]
    while True:
        reply = completion(f"openai/{MODEL}", messages=messages, tools=tools, base_url=base_url, api_key="k")
        messages.append(said := reply.choices[0].message)
        if not said.tool_calls:
            return
        for call in said.tool_calls:
            messages += [{"role": "tool", "tool_call_id": call.id, "content": search(call.function.arguments)}]


def langchain(base_url: str, question: str) -> None:
    """Ask an agent of `create_agent`."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(base_url=base_url, model=MODEL), [search], system_prompt="Search.")
    agent.invoke({"messages": [("user", question)]})


def langgraph(base_url: str, question: str) -> None:
    """Ask a ReAct graph whose model streams."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(base_url=base_url, model=MODEL, streaming=True), [search])
    agent.invoke({"messages": [("user", question)]})


def pydantic_ai(base_url: str, question: str, *, structured: bool = False) -> None:
    """With `structured`, its answer is the function `final_result`."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Reply(BaseModel):
        answer: str
        sureness: float

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="k"))
    agent: Any = Agent(model, tools=[search], output_type=Reply if structured else str)
    agent.run_sync(question)


def smolagents(base_url: str, question: str) -> None:
    """Ask a ToolCallingAgent, which is shown its calls as texts."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=base_url, api_key="k")
    ToolCallingAgent([tool(search)], model, verbosity_level=0).run(question)


def dspy(base_url: str, question: str) -> None:
    """Ask a ReAct, which has one message with all calls so far."""
    import dspy as library

    with library.context(lm=library.LM(f"openai/{MODEL}", api_base=base_url, api_key="k", cache=False)):
        library.ReAct("question -> answer", tools=[search])(question=question)


def llama_index(base_url: str, question: str, *, kind: str = "ReActAgent") -> None:
    """Ask a ReActAgent, which writes calls as texts, or a FunctionAgent."""
    from llama_index.core.agent import workflow
    from llama_index.llms.openai_like import OpenAILike

    calls = kind == "FunctionAgent"
    model = OpenAILike(MODEL, api_base=base_url, api_key="k", is_chat_model=True, is_function_calling_model=calls)

    async def run() -> None:
        await getattr(workflow, kind)(tools=[search], llm=model).run(question)

    asyncio.run(run())


def haystack(base_url: str, question: str) -> None:
    """Ask an Agent."""
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function

    model = OpenAIChatGenerator(model=MODEL, api_base_url=base_url)
    Agent(chat_generator=model, tools=[create_tool_from_function(search)]).run([ChatMessage.from_user(question)])


def agno(base_url: str, question: str) -> None:
    """Ask an Agent."""
    from agno.agent import Agent
    from agno.models.openai import OpenAIChat

    Agent(model=OpenAIChat(id=MODEL, base_url=base_url, api_key="k"), tools=[search], telemetry=False).run(question)
