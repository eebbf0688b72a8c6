"""The table of real-world cases and the tests that cover them: ``python tests/support/cases.py`` writes tests/cases.md.

A case is a bug that users of distillation and training libraries reported in public, restated as a test. A test for the
case X-07 has ``test_x_07`` at the start of its name.
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS / "cases.md"

GROUPS = {
    "A": "Visible devices and the split of the GPUs",
    "B": "Dispatched teachers and the Trainer",
    "C": "Hygiene of the frozen teacher",
    "D": "DeepSpeed",
    "E": "FSDP",
    "F": "DDP and blockwise training",
    "G": "Module names, hooks, wrappers, compilation, checkpointing",
    "H": "Losses",
    "I": "Optimizers, schedules, logging, checkpoints, evaluation, arguments",
    "J": "Streams, overlap, environment",
}

CASES = {
    "A-01": "Plain reorder with the variable unset",
    "A-02": "Importing the helper pulls in torch",
    "A-03": "CUDA already initialised when the helper is called",
    "A-04": "Restricted subset from the scheduler",
    "A-05": "Teacher id not in the visible list",
    "A-06": "Non-ascending list must keep its order",
    "A-07": "Spaces, trailing comma, leading zeros",
    "A-08": 'Empty string, "-1", "NoDevFiles"',
    "A-10": "Duplicate entries",
    "A-11": "UUID entries",
    "A-12": "UUID and integer mixed",
    "A-13": "MIG instances",
    "A-15": "Same answer in every torchrun rank",
    "A-16": "No student left / no teacher given",
    "A-17": "Bad types of teacher ids",
    "A-18": "Board count without torch, and `nvidia-smi` ignores the variable",
    "A-19": "No `nvidia-smi`, no driver, macOS/Windows/CPU box",
    "A-20": "CUDA_DEVICE_ORDER",
    "A-21": "One board per rank (SLURM `--gpus-per-task=1`, `srun`)",
    "A-22": "Containers renumber boards",
    "A-23": "ROCm: HIP / ROCR variables",
    "A-24": "Ascend and Intel devices (`device_type`)",
    "A-26": "More ranks than student boards",
    "A-27": "Placement given but the helper was never called",
    "A-28": "Notebook / launcher that sets the list itself",
    "B-01": "A dispatched or offloaded teacher must not be moved or cast",
    "B-02": '`device_map="auto"` spreads the teacher over student boards',
    "B-03": "Blocks split in the middle",
    "B-04": "Tied embeddings over two devices",
    "B-06": "Rotary inverse frequencies from meta",
    "B-07": "Rotary/position embeddings on another device than the layer",
    "B-08": "Loss between different devices",
    "B-09": "Replicated teacher left on CPU",
    "B-10": "Student flagged as model-parallel by accident",
    "B-11": "DataParallel kicks in when started without torchrun",
    "B-12": "Quantised teacher",
    "B-13": "Every rank loads a full pp teacher on the same boards",
    "B-14": "Does the frozen model need `prepare`?",
    "C-01": "Teacher in train mode (dropout, batch norm)",
    "C-02": "Teacher registered as a submodule of the student or the wrapper",
    "C-03": "Freezing or `eval()` hits the student",
    "C-04": "Teacher weights change",
    "C-05": "Caller's teacher state after training",
    "C-07": "Teacher shifts the random stream of the student",
    "C-08": "Teacher weights silently random",
    "C-09": "Teacher cache and extra outputs",
    "C-10": "Teacher gets labels or columns it does not know",
    "C-11": "Teacher equals the student's base with adapters off",
    "D-02": "`deepspeed.initialize` for a frozen model",
    "D-03": "Two engines in one process",
    "D-05": 'Per-group rates lost under the scheduler or config "auto"',
    "D-06": "Clipping twice or not at all",
    "D-07": "Own optimizer refused",
    "D-08": '"auto" batch size checked before the process group exists',
    "D-09": "CPU-only DeepSpeed without a CUDA toolkit",
    "D-10": "Direct calls to blocks bypass the engine's gathering",
    "D-11": "Frozen layers in the student with ZeRO-2",
    "D-12": "Resume under ZeRO keeps group tags",
    "E-01": "`fsdp=` on CPU is silently plain DDP",
    "E-02": "`_no_split_modules` missing, None or empty",
    "E-04": "`wrap_cls` as string, list, unknown name",
    "E-05": "Size-based policy splits tied weights",
    "E-06": "Submodule called outside the root's forward",
    "E-07": "Optimizer made before wrapping",
    "E-08": "Names changed by wrappers break regex and bookkeeping",
    "E-09": "Mixed `requires_grad` in a flat unit",
    "E-10": "Gradient clipping with local shards",
    "E-11": "Mixed precision for a frozen model",
    "E-12": "RAM-efficient loading leaves other ranks empty",
    "E-13": "Unequal number of teacher forwards → hang",
    "E-14": "Process groups made by some ranks only",
    "E-15": "Checkpoint of a sharded student",
    "E-16": "Two communicators at once with overlap",
    "E-17": 'One rank or no process group with "sharded"',
    "E-18": "Tensor parallel without a plan, odd sizes",
    "E-19": "Teacher doubles host memory",
    "E-20": "Hooks on a sharded teacher under no_grad",
    "F-02": "Loss on early blocks only: later parameters unused",
    "F-03": "Calling `model.module` or a block bypasses gradient sync",
    "F-04": "Teacher wrapped by DDP",
    "F-05": "Buffer broadcast and two forwards",
    "F-06": "Static graph / changing graph",
    "F-07": "`no_sync` and manual backward with accumulation",
    "F-08": "Calling a decoder layer by hand without its keyword inputs",
    "F-09": "Which input does student block k get?",
    "F-10": "Equality 1 process ↔ 2 processes for all distillers",
    "G-01": "Regex hits `layers.1`, `layers.10` and children",
    "G-02": "Regex that matches nothing",
    "G-04": "Layer output is a tensor, not a tuple",
    "G-06": "Gradient checkpointing: inner modules fire twice",
    "G-07": "Hooks removed between forward and backward",
    "G-08": "Hook leaks and doubled hooks",
    "G-09": "torch.compile and hooks",
    "G-10": "`hidden_states[-1]` is not the last layer's output",
    "G-11": "Different widths, and the guide's own pair",
    "G-12": "Different numbers of layers",
    "G-13": "Shared module called several times in one forward",
    "G-14": "Modules without parameters, in nested matches",
    "G-15": "Unknown loss name, callable loss, wrong signature",
    "G-16": "LoRA student: gradients do not reach the adapters with checkpointing",
    "H-02": 'KL "batchmean" on a 3-D tensor',
    "H-03": "Temperature squared",
    "H-04": "Padding and −100 positions counted",
    "H-06": "Padded vocabulary, size mismatch",
    "H-07": "Different tokenizers",
    "H-08": "bf16/fp16 loss arithmetic",
    "H-09": "log-target and argument order",
    "H-10": "Memory of full logits in fp32",
    "H-11": "Data parallel token average",
    "H-12": "Attention mask not given to the teacher",
    "H-13": "Label smoothing or `compute_loss_func` pops labels",
    "I-01": "Schedulers step too often",
    "I-02": "Logging several rates",
    "I-03": "Resume with several optimizers",
    "I-04": "`max_grad_norm`: per group or global",
    "I-05": "fp16 scaler with several optimizers",
    "I-06": "User optimizers and None",
    "I-07": "No labels → no `eval_loss`",
    "I-08": "Evaluation returns and keeps everything",
    "I-09": "`load_best_model_at_end`",
    "I-10": "`remove_unused_columns` drops the columns",
    "I-11": "`label_names` with PEFT or wrappers",
    "I-13": "Checkpoint layout",
    "I-14": "Hidden alignments that never get a loss",
    "J-01": "Tensors freed early on another stream",
    "J-02": "Side stream starts before the inputs are there",
    "J-03": "Non-blocking copy device → host read too soon",
    "J-04": "Events over devices",
    "J-05": "Overlap on CPU",
    "J-07": "DataLoader workers and CUDA after fork",
    "J-08": "CPU torchrun",
    "J-09": "Nested batches when inputs are moved to the teacher's device",
}

# Cases, or parts of cases, that cannot be tested, and why. A case with a test may still have a note for the rest.
NOTES: dict[str, str] = {}

# The notes above that speak of a whole case; every other case needs a test.
WHOLE = {"needs a GPU"}

# Case -> why its test is still missing; empty when all are written.
PENDING: dict[str, str] = {}


def find_tests(folder: Path = TESTS) -> dict[str, list[str]]:
    """Case id -> the tests named after it, as ``path::name``, in the order of the files."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if match := re.match(r"test_([a-z])_(\d\d)(?!\d)", node.name):
                case = f"{match[1].upper()}-{match[2]}"
                found.setdefault(case, []).append(f"{path.relative_to(folder).as_posix()}::{node.name}")
    return found


def missing(
    tests: Mapping[str, list[str]], notes: Mapping[str, str] = NOTES, pending: Mapping[str, str] = PENDING
) -> list[str]:
    """Cases that have neither a test nor a reason why the whole case has none."""
    return [case for case in CASES if case not in tests and notes.get(case) not in WHOLE and case not in pending]


def render(tests: Mapping[str, list[str]]) -> str:
    """The text of tests/cases.md."""
    lines = [
        "# Cases from public bug reports",
        "",
        "Written by `make cases` from `tests/support/cases.py`; do not edit. A case is a bug that was reported against",
        "a training or distillation library, restated as a test of this one.",
    ]
    for group, title in GROUPS.items():
        lines += ["", f"## {group}. {title}", "", "| case | what goes wrong | tests | note |", "|---|---|---|---|"]
        for case, what in CASES.items():
            if case.startswith(group):
                names = "<br>".join(f"`{name}`" for name in tests.get(case, []))
                note = NOTES.get(case, "")
                if case in tests and note in WHOLE:
                    note = ""
                elif case not in tests:
                    note = note or PENDING.get(case, "")
                lines.append(f"| {case} | {what.replace('|', chr(92) + '|')} | {names} | {note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(render(find_tests()), "utf-8")
