"""A script as a user would write it, with a teacher in processes of its own: ``dedicated_script.py FOLDER OPTIONS``.

The teacher's class and the function that builds it are the script's own, there is no ``if __name__ == "__main__"``, and
nothing is ever closed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu

# A shell that starts the tests in the background ignores it for all of them.
signal.signal(signal.SIGINT, signal.default_int_handler)
FOLDER = Path(sys.argv[1])
OPTIONS = {
    "strategy": "pp",
    "devices": 1,
    "source": "module",  # "callable", or a model folder
    "trouble": None,  # "hang" or "raise" in the teacher's third forward
    "heads": 4,
    "steps": 4,
    "timeout": 100.0,
    "workers": 0,
    "pause": 0.0,  # seconds after the second step
    **json.loads(sys.argv[2]),
}
RANK = os.environ.get("RANK", "0")

placement = TeacherPlacement(list(range(6 - OPTIONS["devices"], 6)), strategy=OPTIONS["strategy"], device_type="cpu")
setup_split_gpu(placement)

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, distributed  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback  # noqa: E402

from silverspoon_kd import ResponseBasedDistiller, TrainingArguments  # noqa: E402
from support.tiny import Rows, collate  # noqa: E402

transformers.logging.set_verbosity_error()


class OwnTeacher(Qwen3ForCausalLM):
    """A class that no other process can import."""

    def __init__(self, config, trouble):
        super().__init__(config)
        self.trouble, self.forwards = trouble, 0

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        if type(input_ids) is Tensor:  # and no fake one, which only has a shape
            self.forwards += 1
        # With several processes the last one: the others then wait for it inside their forward.
        last = not distributed.is_initialized() or distributed.get_rank() == distributed.get_world_size() - 1
        if self.forwards == 3 and last and self.trouble == "hang":
            (FOLDER / f"hangs-{os.getpid()}").touch()
            time.sleep(600)
        if self.forwards == 3 and last and self.trouble == "raise":
            raise LookupError("the teacher does not know this word")
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)


class Pause(TrainerCallback):
    """Be busy with something else, such as saving."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            time.sleep(OPTIONS["pause"])


def tiny(seed, hidden, make):
    """Return a model of two layers."""
    torch.manual_seed(seed)
    heads = OPTIONS["heads"]
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=8,
        tie_word_embeddings=False,
    )
    return make(config)


def build_teacher():
    """Return the teacher."""
    return tiny(0, 32, lambda config: OwnTeacher(config, OPTIONS["trouble"]))


sources = {"module": build_teacher, "callable": lambda: build_teacher}
source = sources.get(OPTIONS["source"], lambda: OPTIONS["source"])()
args = TrainingArguments(
    output_dir=str(FOLDER / "output"),
    max_steps=OPTIONS["steps"],
    per_device_train_batch_size=2,
    learning_rate=0.1,
    optim="sgd",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_num_workers=OPTIONS["workers"],
    teacher_placement=placement,
    teacher_timeout=OPTIONS["timeout"],
)
try:
    distiller = ResponseBasedDistiller(
        tiny(1, 16, Qwen3ForCausalLM),
        source,
        args=args,
        train_dataset=Rows(),
        data_collator=collate,
        callbacks=[Pause()],
    )
    distiller.train()
except Exception as error:
    causes = [error, error.__cause__]
    (FOLDER / f"error-{RANK}").write_text("\n".join(f"{type(each).__name__}: {each}" for each in causes if each))
    raise
(FOLDER / f"losses-{RANK}").write_text(
    json.dumps([entry["loss"] for entry in distiller.state.log_history if "loss" in entry])
)
