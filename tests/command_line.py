"""Engine arguments the way vLLM's commands get them: parsed by its own parser, in this process."""

from __future__ import annotations

import argparse

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engines import MODEL


def parse(*words: str) -> argparse.Namespace:
    """What ``vllm serve`` makes of these words after the model."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args: argparse.Namespace = parser.parse_args(["serve", MODEL, *words])
    args.model = args.model_tag
    return args


def engine_config(*words: str) -> VllmConfig:
    """The configuration that ``vllm serve MODEL`` with these words would start an engine with."""
    # On a line of its own: building the parser is what loads the plugin, which replaces from_cli_args.
    args = parse(*words)
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()
