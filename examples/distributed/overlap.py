"""The teacher a batch ahead of the student, on devices of its own: torchrun --nproc_per_node=2 overlap.py"""

from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu

placement = TeacherPlacement(
    teacher_only_devices=[0, 1],  # physical ids as nvidia-smi shows them; here CPU slots
    strategy="pp",
    device_type="cpu",  # leave it out on GPUs
)
setup_split_gpu(placement)

# Only now torch and everything that imports it.
from your_data import get_train_dataset, tiny_qwen3

from silverspoon_kd import HolisticDistiller, TrainingArguments, create_alignments

teacher = tiny_qwen3(hidden_size=64, seed=0)
student = tiny_qwen3(hidden_size=32, seed=1)

alignments = create_alignments(
    teacher_model=teacher,
    student_model=student,
    modules=r"model\.layers\.\d+",
    loss_function="mse",
    output_selector_index=0,
)

args = TrainingArguments(
    output_dir="./output",
    max_steps=4,
    per_device_train_batch_size=4,
    learning_rate=1e-4,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    teacher_placement=placement,
    overlap_teacher_forward=True,
)

distiller = HolisticDistiller(
    teacher_model=teacher,
    alignments=alignments,
    train_dataset=get_train_dataset(),
    args=args,
)
distiller.train()
