"""Programs of other people with our changes: the loss curve is that of the original, and the bits when they are struck.

PORTED_SOURCES names a folder with their repositories (`owner+name`); without it they are fetched.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from chaos.script import PACED, alone, history, struck
from tests.support.examples import EXAMPLES
from tests.support.harness import ENVIRON, Elastic

PORTED = EXAMPLES / "ported"
PROGRAM = Path(__file__).parents[1] / "support" / "program.py"  # runs one, also where torchvision is another build's
specification = importlib.util.spec_from_file_location("port", PORTED / "port.py")
assert specification is not None
assert specification.loader is not None
port = importlib.util.module_from_spec(specification)
specification.loader.exec_module(port)
MOST_LINES, LIMIT_S = 25, 500.0


# --- data, less of it than the programs have, in their formats -----------------------------------------------------


def waves() -> None:
    """The data of time_sequence, which its own program makes."""
    shifts = np.random.default_rng(2).integers(-80, 80, (93, 1))
    torch.save(np.sin((np.arange(12) + shifts) / 20.0), "traindata.pt")


def digits(folder: str, train: int, test: int) -> Callable[[], None]:
    """Pictures in MNIST's files: the figure tells where the bright part is."""

    def write() -> None:
        raw, draw = Path(folder, "MNIST", "raw"), np.random.default_rng(1)
        raw.mkdir(parents=True)
        for part, count in (("train", train), ("t10k", test)):
            labels = draw.integers(0, 10, count)
            pictures = draw.integers(0, 60, (count, 28, 28))
            for picture, label in zip(pictures, labels, strict=True):
                picture[2 * label : 2 * label + 8] += 150
            for kind, values in (("images-idx3", pictures), ("labels-idx1", labels)):
                head = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">i4").tobytes()
                (raw / f"{part}-{kind}-ubyte").write_bytes(head + values.astype(np.uint8).tobytes())
        Path("results").mkdir(exist_ok=True)

    return write


def names() -> None:
    """Words of makemore, one a line."""
    draw = random.Random(1)
    words = ("".join(draw.choices(("an", "bo", "cy", "d", "e", "ri", "li"), k=draw.randint(2, 5))) for _ in range(80))
    Path("names.txt").write_text("\n".join(words))


def histories() -> None:
    """What users of SASRec took, by number. Item 30 is in nobody's history, and is every negative in the calm."""
    draw = random.Random(2)
    lines = [f"{user} {draw.randint(1, 29)}" for user in range(1, 17) for _ in range(draw.randint(5, 9))]
    Path("data").mkdir()
    Path("data/items.txt").write_text("\n".join([*lines, "16 30"]) + "\n")


def thumbnails() -> None:
    """Pictures in CIFAR-10's files."""
    folder, draw = Path("datasets/cifar-10-batches-py"), np.random.default_rng(3)
    folder.mkdir(parents=True)
    for name, count in {**{f"data_batch_{n}": 3 for n in range(1, 5)}, "data_batch_5": 4, "test_batch": 4}.items():
        small = draw.integers(0, 256, (count, 3, 4, 4), np.uint8)
        pictures = small.repeat(8, axis=2).repeat(8, axis=3).reshape(count, -1)
        (folder / name).write_bytes(pickle.dumps({"data": pictures, "labels": draw.integers(0, 10, count).tolist()}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))


def adapted() -> None:
    """Tokens of nanoGPT-LoRA, and a checkpoint of a model with adapters, from which its training resumes."""
    folder, draw = Path("data/openwebtext"), np.random.default_rng(4)
    folder.mkdir(parents=True)
    for part in ("train", "val"):
        np.cumsum(draw.integers(0, 3, 400)).astype(np.uint16).__mod__(17).tofile(folder / f"{part}.bin")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        theirs = runpy.run_path("../model.py")
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "bias": False, "vocab_size": 17}
        model = theirs["GPT"](theirs["GPTConfig"](**sizes, lora_rank=2, lora_alpha=4.0))
        optimizer = theirs["get_lora_model"](model).configure_optimizers(0.1, 0.01, (0.9, 0.95), "cpu")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": sizes}
    Path("out").mkdir()
    shutil.copy("../configurator.py", ".")
    torch.save({**state, "iter_num": 0, "best_val_loss": 1e9}, "out/ckpt.pt")


def smaller(file: str, **numbers: int) -> None:
    """Change numbers in a file of the program, such as `name = 5`."""
    path = Path("..", file)
    text = path.read_text()
    for name, number in numbers.items():
        text, found = re.subn(rf"({name} (?:=|%) )\d+", rf"\g<1>{number}", text)
        assert found, f"{path} has no {name}"
    path.write_text(text)


def sentences() -> None:
    """Words in sentences: which word comes next is nearly certain."""
    draw = np.random.default_rng(3)
    numbers = (np.arange(585) * 7 + draw.integers(0, 3, 585)) % 30
    lines = (" ".join(f"word{n}" for n in numbers[at : at + 9]) for at in range(0, len(numbers), 9))
    Path("data").mkdir()
    Path("data/train.txt").write_text("\n".join(lines))
    smaller("main.py", embed_size=16, hidden_size=16, seq_length=4, num_epochs=2, num_samples=20, step=1)


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """`says`: the losses that it prints, or writes to files like `log`. `steps`: of a run. `seed`: of its history.
    `calmer`: further arguments where its losses are compared. `ours`: those of the port in its runs. `most`: so many
    losses are compared, of a program without an end."""

    data: Callable[[], None]
    arguments: list[str]
    says: str
    steps: int
    seed: int = 3
    environ: dict[str, str] = field(default_factory=dict[str, str])
    log: str = ""
    calmer: list[str] = field(default_factory=list[str])
    ours: list[str] = field(default_factory=list[str])
    most: int | None = None


MNIST_LOSS = r"Loss: ([\d.]+)"
OLD_FILES = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # the program is of a time before torch 2.6
TABLE = {
    "time_sequence": Program(
        waves, ["--steps", "12"], r"(?m)^(?:test )?loss: (\S+)", 12, environ=OLD_FILES, calmer=["--steps", "2"]
    ),
    "mnist": Program(
        digits("../data", 96, 20),
        ["--batch-size", "16", "--epochs", "2", "--log-interval", "1"],
        r"Loss: ([\d.]+)|Average loss: ([\d.]+), Accuracy: (\d+)",
        12,
    ),
    "vae": Program(
        digits("../data", 96, 16),
        ["--batch-size", "16", "--epochs", "2", "--log-interval", "1"],
        r"[Ll]oss: ([\d.]+)",
        12,
    ),
    "makemore": Program(
        names,
        [
            "-i",
            "names.txt",
            "-n",
            "0",
            "--max-steps",
            "102",
            "-b",
            "12",
            "--n-layer",
            "2",
            "--n-embd",
            "16",
            "-l",
            "0.01",
        ],
        r"loss (\d+\.\d+)",
        101,
    ),
    "trades": Program(
        digits("../data", 48, 8), ["--batch-size", "4", "--epochs", "1", "--log-interval", "1"], MNIST_LOSS, 12
    ),
    "diffusion": Program(
        digits("mnist_data", 96, 16),
        [
            "--cpu",
            "--batch_size",
            "16",
            "--epochs",
            "2",
            "--log_freq",
            "1",
            "--model_base_dim",
            "8",
            "--timesteps",
            "20",
            "--n_samples",
            "4",
            "--model_ema_steps",
            "2",
        ],
        r"loss:([\d.]+)",
        12,
    ),
    "lora": Program(
        adapted,
        [
            "--init_from=resume",
            "--device=cpu",
            "--dtype=float32",
            "--compile=False",
            "--lora_rank=2",
            "--lora_alpha=4.0",
            "--batch_size=4",
            "--block_size=16",
            "--gradient_accumulation_steps=1",
            "--learning_rate=0.01",
            "--warmup_iters=2",
            "--max_iters=15",
            "--eval_interval=5",
            "--eval_iters=2",
        ],
        r"loss (\d+\.\d+)",
        16,
    ),
    "sasrec": Program(
        histories,
        [
            "--dataset",
            "items",
            "--train_dir",
            "t",
            "--batch_size",
            "16",
            "--maxlen",
            "8",
            "--hidden_units",
            "16",
            "--num_epochs",
            "16",
            "--device",
            "cpu",
            "--lr",
            "0.01",
        ],
        r"loss in epoch \d+ iteration \d+: (\d+\.\d+)",
        16,
    ),
    "simclr": Program(
        thumbnails,
        [
            "-dataset-name",
            "cifar10",
            "-a",
            "resnet18",
            "-j",
            "1",
            "--epochs",
            "12",
            "-b",
            "16",
            "--disable-cuda",
            "--log-every-n-steps",
            "1",
        ],
        r"Loss: (\d+\.\d+)",
        12,
        log="runs/*/training.log",
    ),
    "actor_critic": Program(
        lambda: None,
        ["--log-interval", "1"],
        r"Last reward: ([\d.]+)\tAverage reward: ([\d.]+)",
        12,
        ours=["--episodes", "4", "--updates", "12"],
        most=80,
    ),
    "language_model": Program(sentences, [], r"Loss: ([\d.]+)", 14),
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.examples, pytest.mark.processes, pytest.mark.timeout(1500)]) for name in TABLE
]


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", port.PROGRAMS)
def test_a_port_adds_few_lines(name: str) -> None:
    program, changes = port.PROGRAMS[name], port.changes(name)
    assert 0 < sum(len(port.added(script)) for script in changes.values()) <= MOST_LINES
    assert set(changes) <= {program["script"], *program["files"]}
    assert re.fullmatch(r"[0-9a-f]{40}", program["commit"])
    assert all(program[key] for key in ("about", "source", "licence", "script"))


def test_the_commands_of_an_ed_script() -> None:
    original = "a\nb\nc\nd\ne"
    assert port.apply("5a\nend\n.\n2,3d\n1c\nA\n# B\n\n.\n0a\nfirst\n.\n", original) == "first\nA\n# B\n\nd\ne\nend\n"
    assert port.added("1c\nA\n# B\n\n.\n2d\n") == ["A"]
    with pytest.raises(ValueError, match="s/a/b/"):
        port.apply("1s/a/b/\n", original)


def test_a_program_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for path, text in {"a/main.py": "one\ntwo\n", "a/parts/part.py": "three\n", "b.py": "no\n"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "x.ed").write_text("1c\nANOTHER\n.\n")
    program = {"source": "", "commit": commit, "script": "a/main.py", "files": ["a/parts/part.py"]}
    monkeypatch.setitem(port.PROGRAMS, "x", {**program, "changes": {"a/parts/part.py": str(tmp_path / "x.ed")}})
    assert port.port("x", tmp_path / "out", str(tmp_path)) == tmp_path / "out" / "ported" / "main.py"
    written = {str(p.relative_to(tmp_path / "out")): p.read_text() for p in (tmp_path / "out").rglob("*.py")}
    assert written == {
        "original/main.py": "one\ntwo\n",
        "original/parts/part.py": "three\n",
        "ported/main.py": "one\ntwo\n",
        "ported/parts/part.py": "ANOTHER\n",
    }


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes a program, and returns the ported script."""

    monkeypatch.chdir(tmp_path)

    def fetch(name: str) -> Path:
        program = port.PROGRAMS[name]
        missing = [module for module in program["needs"] if importlib.util.find_spec(module) is None]
        if missing:
            pytest.skip(f"{name} needs {', '.join(missing)}")
        local = Path(os.environ.get("PORTED_SOURCES", ""), "+".join(program["source"].split("/")[-2:]))
        place = next((str(p) for p in (local / "repo", local) if p.is_dir()), None) if local.name else None
        try:
            script = port.port(name, tmp_path, place)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{program['source']} is not to be had: {error}")
        return script

    return fetch


def begin(name: str, script: Path) -> None:
    """Go to a new folder beside the script, with data of its own."""
    (script.parent / "work").mkdir()
    os.chdir(script.parent / "work")  # the fixture goes back
    TABLE[name].data()


def curve(name: str, script: Path) -> list[str]:
    """The losses that a script prints without randomness, from the start."""
    program = TABLE[name]
    begin(name, script)
    command = [sys.executable, str(PROGRAM), "--calm", str(script), *program.arguments, *program.calmer]
    environ = {**ENVIRON, **program.environ, "PYTHONUNBUFFERED": "1"}
    printed = ""
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed += line
            if program.most and len(numbers(program.says, printed)) >= program.most:
                process.kill()
    assert program.most or process.returncode == 0, printed
    printed += "".join(path.read_text() for path in (Path().glob(program.log) if program.log else ()))
    return numbers(program.says, printed)[: program.most]


def numbers(says: str, text: str) -> list[str]:
    return [number for match in re.finditer(says, text) for number in match.groups() if number]


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_curve_of_the_original(name: str, fetched: Callable[[str], Path]) -> None:
    ported = fetched(name)
    before = curve(name, ported.parents[1] / "original" / ported.name)
    after = curve(name, ported)
    assert len(before) == len(after) > 10
    assert len(set(before)) > len(before) // 2, "a curve that stands still shows nothing"
    largest = 0.0
    for theirs, ours in zip(before, after, strict=True):
        difference, last_digit = abs(float(ours) - float(theirs)), 10.0 ** -len(theirs.partition(".")[2])
        largest = max(largest, difference / abs(float(theirs)))
        assert difference <= max(1e-5 * abs(float(theirs)), 1.01 * last_digit), (theirs, ours)
    print(f"{name}: {len(before)} losses, the largest relative difference is {largest:.1e}")


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_struck_and_resumed(
    name: str, fetched: Callable[[str], Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    program, ported = TABLE[name], fetched(name)
    begin(name, ported)
    words = [str(ported), *program.arguments, *program.ours]
    reference, _ = alone(PROGRAM, words, tmp_path / "alone", limit_s=LIMIT_S)

    pace = tmp_path / "pace"
    pace.write_text("0.5")  # seconds a step: else it is over before the stop
    paced = [str(PROGRAM), *words, "--pace", str(pace)]
    with Elastic(tmp_path / "run", PACED, *paced, workers=1, options=[], deadline_s=LIMIT_S) as run:
        run.until_step(program.steps // 4)
        run.command("stop")
        run.finish()
        assert run.step < program.steps - 1, "it was over before the stop"
    pace.unlink()
    with Elastic(tmp_path / "run", PACED, *paced, workers=2, options=[], deadline_s=LIMIT_S) as run:
        run.finish()
        [finished] = run.events("finished")
        assert finished["equal"]
        assert finished["fingerprint"] == reference.fingerprint

    plan = history(program.seed, workers=2, blows=3, every_s=0.7)
    told, blows = struck(PROGRAM, words, plan, tmp_path / "struck", reference, pace_s=5.0, limit_s=LIMIT_S)
    assert not told.complaints, capsys.readouterr().out
    assert told.faults.total() >= 2, f"too little has happened to it:\n{blows}"
    assert told.views >= 3, blows
