"""What implementations of the kernels have in common."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.layout import PagedLayer
from vllm_h2o.step_plan import StepPlan


@dataclass(frozen=True)
class AttentionShape:
    """What the logits of a layer depend on besides Q and K.

    Attributes:
        scale: factor on ``q . k``.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 = off.
        sinks: ``[num_heads]`` float32 logits of learned attention sinks, or None.
    """

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class LayerState:
    """One evicting layer.

    Attributes:
        name: vLLM's name of the layer.
        cache: views of its KV cache.
        ring: ``[num_ring_slots * block_size, num_heads, head_size]``, the kept decode queries.
    """

    name: str
    cache: PagedLayer
    ring: torch.Tensor
    shape: AttentionShape

    @property
    def salt(self) -> int:
        """Tells layers apart where something is drawn at random: the first number in the name."""
        return next((int(part) for part in self.name.split(".") if part.isdecimal()), 0)


@dataclass(frozen=True)
class LayerSizes:
    """What an implementation's scratch memory depends on.

    Attributes:
        num_layers: layers of this size that are worked on at once.
        num_ring_queries: kept queries of one layer, where those of all its requests may be scored at once.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    element_bytes: int
    num_layers: int = 1
    num_ring_queries: int = 0


class PreparedStep(ABC):
    """A step's work in the form an implementation wants it; shared by all layers."""

    def after_attention(self, layer: LayerState, query: torch.Tensor) -> None:
        """Whatever is due in this step for a layer whose cache holds the step's keys and values already.

        Args:
            query: ``[num_tokens, num_heads, head_size]`` of the whole batch, as attention saw it.
        """
        self.update_scores(layer, query)
        self.drop_tokens(layer)

    @abstractmethod
    def update_scores(self, layer: LayerState, query: torch.Tensor) -> None:
        """Keep queries, reset the scores of blocks that begin, score what is due."""

    @abstractmethod
    def drop_tokens(self, layer: LayerState) -> None:
        """Compact the rows that lose blocks, if there are any; after ``update_scores``."""


class Kernels(ABC):
    """One implementation under one policy."""

    name: str

    def __init__(self, config: KVPolicyConfig) -> None:
        self.config = config

    @abstractmethod
    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Turn a plan into work; once per step."""

    @abstractmethod
    def scratch_bytes(self, sizes: LayerSizes) -> int:
        """Most bytes that the work of the layers takes beside their caches while it runs."""
