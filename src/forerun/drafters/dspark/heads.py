"""The two small heads on the backbone's hidden states: what makes DSpark of DFlash.

The Markov head (arXiv 2607.05147, section 3.1) adds to the base logits of a slot a bias that
depends on the token drafted before it; W1 embeds that token, W2 makes a bias of it. The gated kind
scales the embedding by the slot's hidden state, the rnn kind carries a state along the block. The
confidence head (equation 7) scores the slot from its hidden state and that embedding.
Shapes: N rows, A blocks, g slots, d hidden_size, r rank, V target and Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.drafters.dspark.config import DSparkConfig


class MarkovHead(nn.Module):
    """The vanilla kind: bias = W2 W1[previous]. Others change what W2 is given."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, config.draft_vocab_size, bias=False)

    def embed(self, previous_ids: Tensor) -> Tensor:
        """Return the embeddings [..., r] of target ids [...]."""
        return self.markov_w1(previous_ids)

    def start(self, num_rows: int) -> Tensor | None:
        """Return the state [N, r] before the first slot of N blocks; None if the kind has none."""
        return None

    def step(
        self,
        previous_ids: Tensor,  # [N] target ids
        hidden: Tensor,  # [N, d] of one slot
        state: Tensor | None,  # [N, r]
    ) -> tuple[Tensor, Tensor | None]:
        """Return one slot's bias [N, Vd] and the state for the next slot."""
        mixed, state = self._mix(self.embed(previous_ids), hidden, state)
        return self.markov_w2(mixed), state

    def bias_block(
        self,
        previous_ids: Tensor,  # [A, g] target ids
        hidden: Tensor,  # [A, g, d]
    ) -> Tensor:
        """Return the biases [A, g, Vd] of whole blocks whose tokens are known."""
        return self.markov_w2(self._mix_block(self.embed(previous_ids), hidden))

    def _mix(
        self, embedding: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what W2 is given, [..., r], and the next state."""
        return embedding, None

    def _mix_block(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        return self._mix(embedding, hidden, None)[0]


class GatedMarkovHead(MarkovHead):
    """bias = W2 (sigmoid(G [h ; e]) * e)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)

    def _mix(
        self, embedding: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        gate = self.gate_proj(_join(hidden, embedding))
        return gate.sigmoid() * embedding, None


class RecurrentMarkovHead(MarkovHead):
    """bias = W2 tanh(o) with (u, c, o) = J [s ; e ; h].

    The next state is sigmoid(u) s + (1 - sigmoid(u)) tanh(c); the first is 0.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * self.rank + config.hidden_size, 3 * self.rank)

    def start(self, num_rows: int) -> Tensor | None:
        """Return zeros."""
        return self.markov_w1.weight.new_zeros(num_rows, self.rank)

    def _mix(
        self, embedding: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert state is not None, "the rnn kind steps from start() on"
        update, candidate, output = self.joint_proj(_join(state, embedding, hidden)).chunk(3, -1)
        kept = update.sigmoid()
        return output.tanh(), kept * state + (1 - kept) * candidate.tanh()

    def _mix_block(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        state = self.start(len(embedding))
        mixed = []
        for slot in range(embedding.shape[1]):
            output, state = self._mix(embedding[:, slot], hidden[:, slot], state)
            mixed.append(output)
        return torch.stack(mixed, dim=1)


_MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}


def build_markov_head(config: DSparkConfig) -> MarkovHead | None:
    """Return the configured kind; None for rank 0."""
    return _MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None


class ConfidenceHead(nn.Module):
    """The logit of the chance that a slot's draft is accepted if those before it were."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.confidence_size, 1, bias=config.confidence_bias)
        self.reads_markov = config.reads_markov_in_confidence

    def forward(
        self,
        hidden: Tensor,  # [..., d] after the final norm
        markov_embedding: Tensor | None,  # [..., r] of the token before the slot
    ) -> Tensor:
        """Return float32 logits [...]."""
        if self.reads_markov:
            assert markov_embedding is not None, "this head reads the previous token's embedding"
            hidden = _join(hidden, markov_embedding)
        return self.proj(hidden).squeeze(-1).float()


def _join(*parts: Tensor) -> Tensor:
    """Concatenate features of the first part's type and their own."""
    return torch.cat([part.to(parts[0].dtype) for part in parts], dim=-1)
