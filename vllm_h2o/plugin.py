"""Entry point of the group ``vllm.general_plugins``."""

from typing import Any

from vllm_h2o.config import CONFIG_KEY
from vllm_h2o.errors import SeamError


def register() -> None:
    """Make ``--kv-policy`` known to vLLM. Runs in every vLLM process, possibly more than once.

    vLLM is imported here and not at module level, because plugins are discovered while vLLM itself is
    still being imported. On a vLLM that lacks an extension point nothing is installed but the error, which
    is raised when a policy is asked for: whoever uses none keeps a working vLLM.
    """
    try:
        from vllm_h2o.engine.install import install
        from vllm_h2o.engine.seams import check_seams

        check_seams()
    except (ImportError, SeamError) as error:
        _refuse_policies(error)
    else:
        install()


def _refuse_policies(reason: Exception) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import init_logger

    message = reason if isinstance(reason, SeamError) else f"this vLLM lacks a name we need ({reason})"
    init_logger("vllm.h2o").warning("vllm-h2o is off, --kv-policy is not available: %s", message)
    original = EngineArgs.create_engine_config

    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if CONFIG_KEY in (self.additional_config or {}):
            raise SeamError(str(message)) from reason
        return original(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config
