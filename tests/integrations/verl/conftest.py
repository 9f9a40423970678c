"""verl on the CPU with the adapter, and a real SGLang in this process. `make integrations` runs the tests."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

# verl needs SGLang 0.5.12 and other releases of many packages, so it has an environment of its own.
HAS_VERL = importlib.util.find_spec("verl") is not None
collect_ignore_glob = [] if HAS_VERL else ["*.py"]

ROOT = Path(__file__).parents[3]
MODULES = "tests.integrations.verl.cpu_platform,sglang_topp_integrations.verl"
if HAS_VERL:  # `make test` imports this file too, and its other tests must not see these variables
    # Set before verl is imported, also for the processes that Ray and SGLang start.
    os.environ["VERL_USE_EXTERNAL_MODULES"] = MODULES
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["TORCH_COMPILE_DISABLE"] = "1"

TOP_P = 0.8
Run: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from examples.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("verl") / "model", vocab_size=512)


@pytest.fixture(scope="session")
def config(model_path: Path) -> Any:
    """verl's own configuration, for this model and the CPU."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={model_path}",
                "+actor_rollout_ref.model.override_config.attn_implementation=eager",
                "actor_rollout_ref.rollout.name=sglang",
                f"actor_rollout_ref.rollout.top_p={TOP_P}",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                "actor_rollout_ref.rollout.prompt_length=256",
                "actor_rollout_ref.rollout.response_length=192",
                "actor_rollout_ref.rollout.max_model_len=1024",
                "actor_rollout_ref.rollout.max_num_seqs=16",
                "actor_rollout_ref.rollout.dtype=float32",
                "actor_rollout_ref.rollout.load_format=auto",
                "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
                "actor_rollout_ref.rollout.free_cache_engine=False",
                "actor_rollout_ref.rollout.enforce_eager=True",
                "actor_rollout_ref.rollout.multi_turn.format=calls_at_once",
                "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
                *(
                    f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{option}"
                    for option in (
                        "attention_backend=torch_native",
                        "enable_memory_saver=False",
                        "max_total_tokens=16384",
                        "sleep_on_idle=True",
                    )
                ),
                "actor_rollout_ref.actor.strategy=fsdp2",
                "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
                "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
                "actor_rollout_ref.actor.use_dynamic_bsz=True",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
                "actor_rollout_ref.actor.entropy_coeff=0.01",
                "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
                "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=512",
                "algorithm.adv_estimator=grpo",
                "trainer.device=cpu",
            ],
        )


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Run a coroutine in the loop of the session, where SGLang's tokenizer manager lives."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(580)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(scope="session")
def server(config: Any, run: Run) -> Iterator[Any]:
    """verl's SGLang server with its real scheduler, in this process instead of an actor that holds a GPU."""
    from sglang.srt.platforms import current_platform

    assert (
        current_platform.device_name == "cpu"
    )  # chosen here: verl sets SGLANG_USE_CPU_ENGINE while it imports
    from sglang.srt.utils.watchdog import SubprocessWatchdog
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry

    replica = RolloutReplicaRegistry.get("sglang")(
        0,
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout),
        omega_conf_to_dataclass(config.actor_rollout_ref.model),
        gpus_per_node=1,
    )
    server_class = replica.server_class.__ray_metadata__.modified_class
    server = server_class(replica.config, replica.model_config, RolloutMode.STANDALONE, [], 0, 0, 1, "", 0)
    server._server_address = "127.0.0.1"
    watchdogs: list[SubprocessWatchdog] = []  # verl keeps none of them, and they kill this process
    with pytest.MonkeyPatch.context() as patch:
        start = SubprocessWatchdog.start
        patch.setattr(SubprocessWatchdog, "start", lambda self: (watchdogs.append(self), start(self))[1])
        run(server.launch_server())
    yield server
    for watchdog in watchdogs:
        watchdog.stop()
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
