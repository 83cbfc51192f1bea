"""The programs that the TPU compiler gets, and the facts that are read from its output."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial

import jax
import pytest

from parity_tests.registry import CASES
from tpu_compile import __main__ as command
from tpu_compile import libtpu
from tpu_compile.hlo import Array, collectives, entry, exchanges, precisions
from tpu_compile.outcome import hlo_faults, one_line_reason
from tpu_compile.programs import different_layers, kernel_programs
from tpu_compile.sharded import sharded_programs
from twinscan.command_line import CommandLineError

pytestmark = pytest.mark.usefixtures("x64")

HLO = """\
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %add.1 = f32[]{:T(128)} add(%x, %y)
}

%body (carry: (f32[8,4])) -> (f32[8,4]) {
  %dot.1 = f32[8,4]{1,0:T(8,128)} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %all-gather.1 = f32[8,4]{1,0} all-gather(%dot.1), channel_id=1, dimensions={0}
}

ENTRY %main (a: f32[8,4], b: f32[4,4]) -> f32[] {
  %convolution.2 = f32[8,4]{1,0:T(8,128)S(1)} convolution(%a, %b), dim_labels=bf_io->bf, \
operand_precision={highest,highest}, metadata={op_name="jit(step)/dot_general"}
  %all-reduce.1 = (f32[4]{0:T(128)}, f32[]{:T(128)}) all-reduce(%c, %d), to_apply=%add
  %all-reduce-start = f32[4]{0} all-reduce-start(%e), to_apply=%add
  %all-reduce-done = f32[4]{0} all-reduce-done(%all-reduce-start)
  ROOT %dot.3 = f32[8,4]{1,0} dot(%a, %all-reduce-done), operand_precision={high,default}
}
"""

EXCHANGES = """\
%async_collective_fusion.1 (p: bf16[4,8]) -> bf16[4,32] {
  %a = bf16[4,32]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=8, replica_groups=[2,4]<=[8], \
dimensions={1}, frontend_attributes={chain_id="12"}, metadata={op_name="x"}
}

%async_collective_fusion.2 (p: bf16[4,8]) -> bf16[4,32] {
  %b = bf16[4,32]{1,0} all-gather(%p), channel_id=8, replica_groups=[2,4]<=[8], dimensions={1}, \
frontend_attributes={chain_id="12"}
}

%all-reduce-scatter.9 (p: f32[8,16]) -> f32[4,16] {
  %c = f32[8,16]{1,0} all-reduce(%p), channel_id=1, \
replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, to_apply=%add
}

ENTRY %main (a: f32[3]) -> f32[] {
  %d = (f32[3]{0}, f32[3]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%a), \
channel_id=2, source_target_pairs={{0,1},{1,0}}
  %e = (pred[4,2]{1,0}, /*index=1*/s32[]) all-reduce(%x, %y), \
replica_groups={{0,2},{1,3}}, to_apply=%or
  %f = f32[2]{0} all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %g = f32[2]{0} all-to-all(%x), replica_groups=mesh['a'=4,'b'=2], \
device_ids=([2,4]T(1,0)) {'b'}, dimensions={0}
}
"""

TOO_LARGE = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(24.80G) exceeds available HBM (15.75G)."
)

with_libtpu = pytest.mark.skipif(
    not libtpu.folder().exists(),
    reason="the TPU compiler is not installed: run `make tpu-compile`",
)


def test_what_a_program_says():
    assert collectives(HLO) == {"all-gather": 1, "all-reduce": 2}
    assert collectives(entry(HLO)) == {"all-reduce": 2}
    assert precisions(HLO) == {"default": 1, "highest": 1, "high/default": 1}
    with pytest.raises(ValueError, match="expected an ENTRY computation"):
        entry("HloModule jit_step\n")


def test_what_a_program_exchanges():
    """A chain of fusions counts as one collective. Groups have three notations."""
    bf16, f32 = partial(Array, "bf16"), partial(Array, "f32")
    of_4 = ((0, 1, 2, 3), (4, 5, 6, 7))
    of_2 = ((0, 4), (1, 5), (2, 6), (3, 7))
    assert exchanges(EXCHANGES) == [
        ("all-gather", (bf16((4, 32)),), of_4),
        ("reduce-scatter", (f32((8, 16)),), of_2),
        ("collective-permute", (f32((3,)),), ((0, 1), (1, 0))),
        ("all-reduce", (Array("pred", (4, 2)), Array("s32", ())), ((0, 2), (1, 3))),
        ("all-gather", (f32((2,)),), ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("all-to-all", (f32((2,)),), of_2),
    ]
    assert [each.nbytes for each in exchanges(EXCHANGES)] == [256, 512, 12, 12, 8, 8]
    with pytest.raises(ValueError, match="expected the groups of a collective, got mesh"):
        exchanges(EXCHANGES.replace("{'b'}", "{'b':(1)2}"))


def test_what_is_wrong_with_a_program():
    assert [*hlo_faults(HLO, {"all-reduce": 1})] == [
        "expected all-reduce 1, got all-gather 1, all-reduce 2",
        "all-gather 1 in a loop or a branch",
        "2 of 3 products are coarser than float32: default 1, highest 1, high/default 1",
    ]
    right = "\n".join(line for line in HLO.splitlines() if "high," not in line)
    right = right.replace("%dot.1 = f32[8,4]{1,0:T(8,128)} dot", "%a.1 = f32[8,4] add")
    right = right.replace(" all-gather(", " add(")
    assert not [*hlo_faults(right, Counter({"all-reduce": 2}))]
    assert [*hlo_faults(right, {})] == ["expected none, got all-reduce 2"]


def test_a_reason_is_one_line():
    for size, needed in (("24.80G", "24.80"), ("2.50T", "2560.00")):
        message = one_line_reason(RuntimeError(TOO_LARGE.replace("24.80G", size)))
        assert message == f"too large for a chip: needs {needed} GiB of 15.75 GiB"
    assert one_line_reason(NotImplementedError("no rule\nfor it")).endswith(
        "NotImplementedError: no rule"
    )


@pytest.mark.slow
def test_kernels_are_compiled_for_each_kind_of_chip_and_all_else_for_one(monkeypatch):
    monkeypatch.setattr(libtpu, "topology", lambda name: libtpu.Topology(name, jax.devices()[:1]))

    def compiled_for(kind: str, **arguments) -> set[str]:
        programs = command.programs(command.Arguments(**arguments))
        return {program.name for program in programs if program.topology.startswith(kind)}

    kernels = {kernel.name for kernel in kernel_programs(libtpu.topology("v6e:1x1"))}
    cases = [case for case in CASES.values() if "tpu" in case.platforms]
    others = {case.name for case in different_layers(cases)}
    others.add("train step of lstm")
    sharded = {program.name for program in sharded_programs(libtpu.topology)}
    assert compiled_for("v5e") == kernels | others | sharded
    assert compiled_for("v6e") == kernels
    assert compiled_for("v6e", chip=("v6e",)) == kernels | others
    assert {"RWKV7TimeMix", "RWKV7TimeMix by chunks", "RWKV7LanguageModel"} <= others
    assert len(others) < len(cases) / 2
    assert compiled_for("v5e", case=("tied",)) == {x.name for x in cases if "tied" in x.name}


def test_jax_says_which_libtpu(monkeypatch):
    requires = ["scipy>=1.14", 'libtpu==0.0.42.*; extra == "tpu"', 'requests; extra == "tpu"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    assert str(libtpu.requirement().specifier) == "==0.0.42.*"


@pytest.mark.parametrize(
    ("version", "args", "message"),
    [
        (None, [], "no libtpu; `make tpu-compile` installs it"),
        ("0.0.1", [], r"expected libtpu==\S+ for jax \S+, got 0.0.1; rem"),
        (None, ["--rows", "0"], "--rows:"),
        (None, ["--chip", "v1"], "--chip"),
        (None, ["--preset", "none"], "--preset"),
    ],
)
def test_refuses(version, args, message, tmp_path, monkeypatch):
    if version:
        pretend(tmp_path / "tpu", version)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(CommandLineError, match=message):
        command.main(args)


@pytest.mark.slow
def test_libtpu_that_cannot_be_loaded(tmp_path):
    pretend(tmp_path / "tpu", str(libtpu.requirement().specifier).strip("=*") + "0")
    done = run(
        f"sys.prefix = {str(tmp_path)!r}\n"
        "from twinscan.command_line import run_command\n"
        "run_command(command.main, ['--case', 'relu'], 'tpu')"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tpu: error: libtpu: ")


def pretend(folder, version):
    """Installs a fake libtpu."""
    (folder / "libtpu").mkdir(parents=True)
    (folder / "libtpu" / "libtpu.so").touch()
    information = folder / f"libtpu-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: libtpu\nVersion: {version}\n")


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code next to the command in another process, which may load libtpu and compiles fast."""
    head = "import sys\nfrom tpu_compile import __main__ as command\n"
    env = os.environ | {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1"}
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.slow
@with_libtpu
@pytest.mark.xdist_group("libtpu")
class TestCompiled:
    """Each test runs the compiler in another process. `make tpu-compile` runs what is right."""

    layer = ("--case", "LSTM, 1 layer")
    step = ("--case", "train step", "--preset", "all-work")

    def compile(self, path, *args, change=""):
        """Runs the command. Returns its lines, its exit code, and its programs by title."""
        args = ["--chip", "v5e", "--json", str(path), *args]
        done = run(f"{change}\nraise SystemExit(command.main({args}))")
        assert done.returncode in (0, 1), done.stderr
        programs = json.loads(path.read_text())["programs"]
        by_title = {f"{p['name']}, {p['part']}, {p['topology']}": p for p in programs}
        return done.stdout.splitlines(), done.returncode, by_title

    def test_a_hyena_with_dropout_exchanges_no_more(self, tmp_path):
        change = """
import dataclasses
from train.run.config import PRESETS
small = PRESETS["annotated-hyena-small"]
model = dataclasses.replace(small.model, features=8, num_layers=1)
PRESETS["all-work"] = dataclasses.replace(small, model=model, window=16, batch_size=2)
"""
        _, code, programs = self.compile(tmp_path / "record.json", *self.step, change=change)
        assert code == 0
        many = programs["train step of all-work, 2 rows a chip, v5e:16x16"]
        assert many["collectives"] == {"all-reduce": 1}

    small = """
import dataclasses
from tpu_compile import sharded
sizes = {"vocab_size": 512, "features": 128, "mlp_features": 384}
for name, window in ("LARGE_MODEL", 64), ("LONG_SEQUENCES", 2**14):
    config = getattr(sharded, name)
    model = dataclasses.replace(config.model, **sizes)
    setattr(sharded, name, dataclasses.replace(config, model=model, window=window))
"""
    sharded = ("--case", "billion", "--case", "million")

    def test_hybrids_exchange_no_more(self, tmp_path):
        """No array of a batch has the sizes of a parameter."""
        change = """
import dataclasses
from tpu_compile import sharded
shared = {"vocab_size": 2048, "features": 256, "mlp_features": 4096}
heads = {"head_features": 64, "num_key_heads": 8, "num_value_heads": 8}
heads |= {"key_features": 64, "value_features": 64}
experts = {"num_dense_layers": 1, "num_experts": 16, "expert_features": 512}
sizes = {"Qwen3.5-0.8B": {"num_layers": 4, **heads}, "LFM2-350M": {"num_layers": 3, **experts}}
small = {
    name: dataclasses.replace(config, **shared, **sizes[name])
    for name, config in sharded.published_models(remat="full").items()
    if name in sizes
}
sharded.published_models = lambda remat: small
sharded.ON_16_CHIPS["window"] = 96
"""
        hybrids = "--large", "--case", "Qwen", "--case", "LFM2"
        _, code, programs = self.compile(tmp_path / "record.json", *hybrids, change=change)
        assert {title: program["faults"] for title, program in programs.items()} == {
            "Qwen3.5-0.8B, mesh 4 × 4 × 1, v5e:4x4": [],
            "LFM2-350M, mesh 4 × 4 × 1, v5e:4x4": [],
        }
        assert code == 0

    def test_a_gather_of_a_parameter_over_model_or_of_time_fails(self, tmp_path):
        change = """
from train.trainer import step
step.layer_spec = lambda spec, mesh: spec
token_losses = step.token_losses
def gathering(*args, **more):
    losses = token_losses(*args, **more)
    return losses + 0 * jax.lax.all_gather(losses, "sequence").max()
step.token_losses = gathering
import jax
"""
        path = tmp_path / "record.json"
        _, code, programs = self.compile(path, *self.sharded, change=self.small + change)
        assert code == 1
        parameters, time = (program["faults"] for program in programs.values())
        assert any(re.match(r"all-gather of .* over model, the size of ", x) for x in parameters)
        assert any(re.match(r"\S+ numbers are gathered", x) for x in parameters)
        assert any(re.match(r"all-\S+ of .*, the chips' carries have 6,144$", x) for x in time)

    def test_too_large_for_a_chip(self, tmp_path):
        path = tmp_path / "record.json"
        lines, code, programs = self.compile(path, *self.layer, *self.step, "--rows", "2000000")
        assert code == 1
        assert not programs["torch.nn.LSTM, 1 layer, forward, v5e:1x1"]["faults"]
        of_step = "train step of all-work, 2000000 rows a chip, v5e:1x1"
        [line] = [line for line in lines if of_step in line]
        [fault] = programs[of_step]["faults"]
        assert line == f"FAIL {of_step}: {fault}"
        assert fault.startswith("too large for a chip: needs ")
        assert fault.endswith(" GiB of 15.75 GiB")
