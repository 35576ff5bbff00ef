"""What evenstep exports, pinned: a change here is a change for users."""

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import evenstep
import evenstep.book.d2l
from evenstep import d2l

SOURCE = Path(evenstep.__file__).parent

_EXPORTS = {
    "evenstep": """
        Device Engine Experiment Exported Faults Hybrid Hybridized Layout Owners Shards
        Slices Stages Trainer all_gather callbacks compare data errors export find_devices
        hybridize load_exported metrics models nn plan portable record scale_lr shared
        try_all_gpus try_gpu verify
    """,
    "evenstep.arithmetic": "is_portable is_portable_here portable portable_facts within",
    "evenstep.arithmetic.composed": "",
    "evenstep.arithmetic.elements": "",
    "evenstep.arithmetic.scattered": "",
    "evenstep.arithmetic.sums": "",
    "evenstep.arithmetic.together": """
        NotTogetherError add_up computing_together is_of_shards of_shards shards_of
    """,
    "evenstep.batch": """
        Batch Cut Part ProcessAssignment Shards contiguous_runs count_examples cut_batch
        dealt_pairs shard_bounds shared
    """,
    "evenstep.bench.workload": """
        BATCHES Job Stopwatch Training Workload each_ms find_workload in_memory make_dataset
        make_loader make_network make_optimizer make_step time_steps
    """,
    "evenstep.bench": """
        Contender Record Scaled Summary against installed paired_ratios rotated run_rounds
        scaled scaling side_by_side speeds steps_for summarise
    """,
    "evenstep.book": "",
    "evenstep.reproduce": "Experiment Kept Part Row Workplace experiments run write_report",
    "evenstep.reproduce.splits": "",
    "evenstep.callbacks": """
        Callback EpochRecord EpochStart LiveCurve ProgressBar RunLog SaveRecord StepRecord
    """,
    "evenstep.checkpoint": "",
    "evenstep.cli": "main",
    "evenstep.cli.machine": "",
    "evenstep.cli.options": "",
    "evenstep.cli.planning": "",
    "evenstep.cli.processes": "",
    "evenstep.cli.records": "",
    "evenstep.cli.terminal": "",
    "evenstep.cli.traces": "",
    "evenstep.cli.training": "",
    "evenstep.collectives": """
        CanonicalSum Collectives Forest LocalTransport SumAtOwner Transfer Transport TreePlan
        TreeSum add_in_order assign_owners canonical_sum connect even_bounds forest
        ranked_sum sent_elements start_sum tree_plan tree_sum values_at_once wait_all
    """,
    "evenstep.comparison": "Cause Finding Run compare find_cause lines_of read_run",
    "evenstep.comparison.page": "page_of",
    "evenstep.contract": "ContractReport SelfCheck refuse_modes",
    "evenstep.contract.adding_up": "",
    "evenstep.contract.outside": "",
    "evenstep.data": "Cursor GeneratorStates Loader digits epoch_order fashion_mnist",
    "evenstep.data.adapters": "",
    "evenstep.devices": """
        Device Devices StagedDevice arithmetic_facts as_device carry cgroup_quota_cores
        deterministic_kernels find_devices free_memory_nbytes gpu_count hash_seed in_stages
        instruction_facts
        intra_op_threads kept_memory known_results layout_notes parse_device process_wide
        rounding_notes short_switch_interval torch_settings try_all_gpus try_gpu
        usable_cores
    """,
    "evenstep.distributed.accelerators": "",
    "evenstep.distributed": """
        Exchange LauncherWatch Peers StatusBoard agree differences follow_the_first
        is_first job_share join listed local_share machine_count read_secret
        refuse_divergence refuse_wrong_sums restarts shared_bytes
        show_reported_errors_in_one_line was_launched
    """,
    "evenstep.distributed.machines": "",
    "evenstep.distributed.owners": "",
    "evenstep.distributed.shared": "",
    "evenstep.engine": "Engine Handle InlineLanes Lanes Pending PendingNumber Task ThreadLanes Var",
    "evenstep.inference": "",
    "evenstep.integrations": "",
    "evenstep.models": "gpt lenet mlp resnet18",
    "evenstep.mxnet": """
        Context MXNetError autograd close cpu current_context gluon gpu init metric nd np
        npx num_gpus operation optimizer random sym waitall
    """,
    "evenstep.mxnet.core": "",
    "evenstep.mxnet.gluon": """
        Block Constant HybridBlock Parameter ParameterDict SymbolBlock Trainer data loss nn
        utils
    """,
    "evenstep.mxnet.gluon.data": "ArrayDataset DataLoader Dataset SimpleDataset transforms vision",
    "evenstep.mxnet.ops": "",
    "evenstep.mxnet.symbols": "",
    "evenstep.nn": "SlicedConv2d SlicedEmbedding SlicedLinear slice_ sliced_layers",
    "evenstep.options": "Experiment Faults Layout Owners Slices Stages",
    "evenstep.private_torch": "",
    "evenstep.planning": """
        Arrangement Comparison Link Machine MeasuredRun Plan Prediction StepTimes Work compared
        facts_of measured_run parse_network plan predict simulate work_of_trace
    """,
    "evenstep.profiling": "",
    "evenstep.recording": "LEVELS Recorder record",
    "evenstep.replicas": """
        JUDGE Members OptimizerProxy Replica Replicas StandIn align_state check_followed
        check_trainable complete hookable inner_optimizers is_left is_plain_value
        layer_settings move_home note_left optimizer_settings original_of own_gradients
        plain_attributes python_number refuse_gradients_in_flight refuse_strangers
        with_safe_format written_error
    """,
    "evenstep.shard": "",
    "evenstep.stages": "",
    "evenstep.steps": "",
    "evenstep.steps.executors": """
        IndependentExecutor LockstepExecutor SlicedExecutor explain lockstep_option
    """,
    "evenstep.steps.groups": "",
    "evenstep.steps.in_flight": "",
    "evenstep.steps.owners": "",
    "evenstep.training": "",
    "evenstep.training.evaluation": "",
    "evenstep.training.setup": "",
}
EXPORTS = {package: names.split() for package, names in _EXPORTS.items()}
PACKAGES = {
    ".".join(["evenstep", *path.parent.relative_to(SOURCE).parts]): path
    for path in sorted(SOURCE.rglob("__init__.py"))
}


def test_every_package_is_pinned():
    assert sorted(EXPORTS) == sorted(PACKAGES)


@pytest.mark.parametrize("package", EXPORTS)
def test_exports_are_pinned_sorted_and_documented(package):
    module = importlib.import_module(package)
    exported = getattr(module, "__all__", [])
    assert exported == EXPORTS[package]
    assert exported == sorted(exported)
    assert [name for name in exported if not getattr(module, name).__doc__] == []


def is_plain_value(node, package):
    """Say whether a statement may stand in an `__init__.py`."""
    if isinstance(node, ast.ImportFrom):
        return all(alias.asname is None for alias in node.names)
    if package == "evenstep" and isinstance(node, ast.If):  # TYPE_CHECKING, or not
        return all(is_plain_value(one, package) for one in node.body)
    if isinstance(node, ast.FunctionDef):
        return package == "evenstep" and node.name in ("__dir__", "__getattr__")
    if isinstance(node, ast.Assign):
        (target,) = node.targets
        more = {"__version__", "_DEFINED_IN"} if package == "evenstep" else set()
        has_aliases = package in ("evenstep.mxnet", "evenstep.mxnet.gluon")
        allowed = {"__all__", *more, *["__getattr__"] * has_aliases}
        return isinstance(target, ast.Name) and target.id in allowed
    return isinstance(node, ast.Import)


def imported_from_evenstep(path):
    """Return the names that an `__init__.py` imports, and the module that each comes from."""
    return {
        alias.name: node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("evenstep")
        for alias in node.names
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_an_init_holds_exports_only(package):
    docstring, *statements = ast.parse(PACKAGES[package].read_text(encoding="utf-8")).body
    assert isinstance(ast.literal_eval(docstring.value), str)
    assert [ast.unparse(node) for node in statements if not is_plain_value(node, package)] == []
    names = set(imported_from_evenstep(PACKAGES[package])) - {"lookup"}  # of `__getattr__`
    assert sorted(names) == EXPORTS[package]


def test_names_come_from_where_type_checkers_see_them():
    seen = imported_from_evenstep(PACKAGES["evenstep"])
    assert {k: v for k, v in seen.items() if v != "evenstep"} == evenstep._DEFINED_IN


def test_the_version_is_the_distributions():
    assert evenstep.__version__ == importlib.metadata.version("evenstep")


def test_the_package_is_typed():
    assert (SOURCE / "py.typed").is_file()


STAGES = "import evenstep; dir(evenstep)", "evenstep.Trainer", "from evenstep import *"


@pytest.fixture(scope="module")
def loaded():
    """The modules that a process of its own has imported after each of `STAGES`."""
    script = "".join(f"{stage}\nimport sys; print(*sys.modules)\n" for stage in STAGES)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return [{*line.split()} for line in done.stdout.splitlines()]


def test_importing_evenstep_loads_no_torch(loaded):
    """Until a public name is used."""
    assert not loaded[0] & {"torch", "numpy", "optree"}
    assert "torch" in loaded[1]


def test_importing_evenstep_loads_no_command_line(loaded):
    """And none of what is slow to import and seldom needed."""
    assert "evenstep.training.trainer" in loaded[2]
    assert not loaded[2] & {"evenstep.cli", "evenstep.book", "evenstep.bench", "evenstep.mxnet"}
    assert not loaded[2] & {"click", "rich", "pooch", "requests", "sklearn"}
    assert not loaded[2] & {"tensorboard", "torchmetrics", "matplotlib", "IPython"}
    assert not loaded[2] & {"lightning", "pytorch_lightning", "transformers", "accelerate"}


def test_a_name_that_is_not_public_is_refused():
    with pytest.raises(AttributeError, match="module 'evenstep' has no attribute 'Trainr'"):
        evenstep.Trainr  # noqa: B018


def test_dir_shows_what_is_public_and_nothing_else():
    assert dir(evenstep) == sorted([*EXPORTS["evenstep"], "__version__"])


def test_d2l_is_the_books():
    assert d2l.__all__ == evenstep.book.d2l.__all__
    assert all(getattr(d2l, name) is getattr(evenstep.book.d2l, name) for name in d2l.__all__)
