"""What an FSDP run refuses before anything is sharded."""

import pytest

from silverspoon_kd.errors import ConfigurationError, PlacementError
from silverspoon_kd.training.assembly import check_optimizer
from support.distil import make
from support.tiny import qwen3


def made(folder, **config):
    return make("holistic", folder, fsdp=True, fsdp_config=config)


@pytest.mark.filterwarnings("ignore:FSDP1")
def test_e_09_fsdp_1_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="version=1 flattens the parameters"):
        made(tmp_path, version=1, use_orig_params=False)


def test_local_state_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="LOCAL_STATE_DICT' does not exist in FSDP2"):
        made(tmp_path, state_dict_type="LOCAL_STATE_DICT")


def test_unknown_blocks_are_refused_with_the_classes_there_are(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"transformer_layer_cls_to_wrap=\['Qwen3Decoder'\].*Qwen3DecoderLayer"
    ):
        made(tmp_path, transformer_layer_cls_to_wrap="Qwen3Decoder")


def test_one_process_is_refused(tmp_path):
    with pytest.raises(PlacementError, match="this process is alone"):
        made(tmp_path)


def test_a_first_rank_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="has no values"):
        make("response", tmp_path, student=qwen3(1).to("meta"), fsdp=True)


def test_e_07_an_optimizer_of_whole_parameters_is_refused(tmp_path):
    distiller = make("holistic", tmp_path)
    optimizer = distiller.create_optimizer()
    check_optimizer(optimizer, distiller.root, "ddp")
    with pytest.raises(ConfigurationError, match="FSDP puts shards in their place"):
        check_optimizer(optimizer, distiller.root, "fsdp")
