"""Entry point of the group ``vllm.general_plugins``."""


def register() -> None:
    """Make ``--kv-policy`` known to vLLM. Runs in every vLLM process, possibly more than once.

    vLLM is imported here and not at module level, because plugins are discovered while vLLM itself is
    still being imported.

    Raises:
        SeamError: the installed vLLM lacks an extension point.
    """
    from vllm_h2o.engine.compat import check_seams
    from vllm_h2o.engine.install import install

    check_seams()
    install()
