"""Decoder: one forward pass for every family, driven by the configuration.

Owns the order of a layer's operations. The kernel backend owns their arithmetic. Every layer stores all keys and values
of the step before any token attends. So a sequence may read blocks that another sequence fills in the same step. Layers
that attend within a window get the step's plan cut to it. Outputs of the last layer that are not read are not computed.

Shapes: T tokens in the step, S rows that get logits, V vocabulary, H hidden size, N query heads, K kv heads. A = N D
attention width, D head size, B blocks in the pool, P tokens a block, I intermediate size, M positions of the rotary
table, X ranks.
"""

from collections.abc import Sequence

import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.interface import Backend, HeadNorms, split_heads
from blockyard.kernels.lora import LoraPlan
from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.division import ModelPart, divide
from blockyard.worker.model.lora import LoraLayer, LoraStep
from blockyard.worker.model.rotary_table import query_scales, rotary_table
from blockyard.worker.model.weights import ExpertWeights, LayerWeights, Weights
from blockyard.worker.parallel.collective import Alone, Collective

Adds = tuple[LoraLayer, LoraPlan]
"""The adapters of a layer, and the tokens that use them."""


class Decoder:
    """Weights and backend of one model, or of one rank's part of it. Holds no state of any request.

    It takes the weights over: their matrices are packed for the backend, in place.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        backend: Backend,
        *,
        part: ModelPart | None = None,
        collective: Collective | None = None,
    ) -> None:
        self._part = part or divide(config)
        self._config = config = self._part.config
        self._collective = collective or Alone()
        self._weights = weights
        self._backend = backend
        weights.pack(backend)
        self._scale = config.attention_scale or config.head_dim**-0.5
        # As a factor of its own type would be rounded.
        self._embedding_scale = float(weights.embedding_VH.new_tensor(config.embedding_scale))
        thetas = config.layer_rope_thetas or (None,) * config.num_layers
        ropes = tuple(zip(thetas, config.rotated_layers or (True,) * config.num_layers, strict=True))
        device = weights.embedding_VH.device
        tables = {
            (theta, rotates): rotary_table(config, theta, rotates=rotates).to(device)
            for theta, rotates in set(ropes)
        }
        self._rotary_tables = tuple(tables[rope] for rope in ropes)
        scaling = config.query_scaling
        self._scaled_layers = frozenset[int]() if scaling is None else scaling.layers
        self._query_scale_M = (
            None if scaling is None else query_scales(scaling, config.max_position_embeddings).to(device)
        )

    def forward(
        self,
        tokens_T: torch.Tensor,
        kv_pools: Sequence[torch.Tensor],
        plan: AttentionPlan,
        logits_rows_S: torch.Tensor,
    ) -> torch.Tensor:
        """Return logits [S, V] of the tokens at the indices `logits_rows_S`, in the data type of the weights."""
        return self.logits(self.hidden(tokens_T, kv_pools, plan, logits_rows_S))

    def logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Return [S, V] from what `hidden` returned. On a rank other than 0, what is returned means nothing."""
        logits_SV = self._backend.linear(hidden_SH, self._weights.lm_head_VH)
        if self._config.logits_scale != 1.0:
            self._backend.scale(logits_SV, self._config.logits_scale)
        if self._part.size == 1:
            return logits_SV
        gathered_SV = self._collective.gather(logits_SV)
        return (
            logits_SV if gathered_SV is None else gathered_SV[:, : self._part.whole.vocab_size].contiguous()
        )

    def largest(self, hidden_SH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token of the largest logit of each row [S], and whether all logits of the row are finite [S].

        The ranks gather three numbers a row instead of logits, which need no scale. On a rank other than 0, what is
        returned means nothing.
        """
        logits_SV = self._backend.linear(hidden_SH, self._weights.lm_head_VH)
        found_S3 = torch.full((len(hidden_SH), 3), float("-inf"), device=logits_SV.device)
        found_S3[:, 2] = 1.0
        if num_tokens := self._part.num_tokens:
            own_SV = logits_SV if num_tokens == logits_SV.shape[1] else logits_SV[:, :num_tokens].contiguous()
            tokens_S, is_finite_S = self._backend.greedy_tokens(own_SV)
            found_S3[:, 0] = own_SV.gather(1, tokens_S[:, None])[:, 0]
            # Exact: a vocabulary has at most 2^24 tokens (MAX_SIZE).
            found_S3[:, 1] = tokens_S + self._part.first_token
            found_S3[:, 2] = is_finite_S
        gathered = self._collective.gather(found_S3)
        by_rank_SX3 = (found_S3 if gathered is None else gathered).view(len(hidden_SH), -1, 3)
        best_S1 = by_rank_SX3[:, :, 0].argmax(dim=1, keepdim=True)
        tokens_S = by_rank_SX3[:, :, 1].gather(1, best_S1)[:, 0].long()
        return tokens_S, by_rank_SX3[:, :, 2].amin(dim=1) > 0

    def hidden(
        self,
        tokens_T: torch.Tensor,
        kv_pools: Sequence[torch.Tensor],
        plan: AttentionPlan,
        rows_S: torch.Tensor | None,
        *,
        rows_plan: AttentionPlan | None = None,
        lora: LoraStep | None = None,
    ) -> torch.Tensor:
        """Return the last layer's normalised output [S, H] for the tokens at the indices `rows_S`. None: of all.

        `tokens_T` are at the plan's positions. `kv_pools` has one [B, 2, K, P, D] for each layer. With `rows_plan`, the
        attention plan of these rows alone, the last layer computes no other rows. `lora` adds the tokens' adapters.
        """
        weights = self._weights
        # The first norm leaves the residual as it is. The following ones add each block's output to it.
        residual_TH = self._embed(tokens_T)
        x_TH = self._input(residual_TH, weights.layers[0].input_norm_H)
        windows = self._config.layer_windows
        plans = {window: _within(plan, window) for window in set(windows)}
        scale_T11 = None
        if self._query_scale_M is not None:
            scale_T11 = self._query_scale_M[plan.positions_T][:, None, None]
        adapters = (None,) * len(windows) if lora is None else lora.layers
        lora_plan = None if lora is None else lora.plan
        for index, layer, next_layer, pool_B2KPD, window, table_MD, adapter in zip(
            range(len(windows)),
            weights.layers,
            (*weights.layers[1:], None),
            kv_pools,
            windows,
            self._rotary_tables,
            adapters,
            strict=True,
        ):
            adds = None if adapter is None or lora_plan is None else (adapter, lora_plan)
            attends = plans[window]
            q_TND = self._project_and_store(layer, x_TH, table_MD, pool_B2KPD, attends, adds)
            if scale_T11 is not None and index in self._scaled_layers:
                q_TND.mul_(scale_T11)
            if next_layer is None and rows_S is not None and rows_plan is not None:
                q_TND, residual_TH, attends = q_TND[rows_S], residual_TH[rows_S], _within(rows_plan, window)
                if adapter is not None and lora is not None and lora.rows_plan is not None:
                    adds = adapter, lora.rows_plan
            x_TH = self._attend(layer, q_TND, pool_B2KPD, attends, adds)
            self._collective.all_reduce(x_TH)
            x_TH = self._add(x_TH, residual_TH, layer.attention_output_norm_H, layer.mlp_norm_H)
            x_TH = self._mlp(layer, x_TH, adds)
            self._collective.all_reduce(x_TH)
            if next_layer is not None:
                x_TH = self._add(x_TH, residual_TH, layer.mlp_output_norm_H, next_layer.input_norm_H)
        if rows_S is not None and rows_plan is None:
            x_TH, residual_TH = x_TH[rows_S], residual_TH[rows_S]
        return self._add(x_TH, residual_TH, weights.layers[-1].mlp_output_norm_H, weights.final_norm_H)

    def _input(self, residual_TH: torch.Tensor, norm_H: torch.Tensor | None) -> torch.Tensor:
        """Return what the next block reads: the residual itself, where it is not normalised."""
        if norm_H is None:
            return residual_TH
        x_TH = torch.empty_like(residual_TH)
        self._backend.rms_norm(residual_TH, norm_H, self._config.rms_norm_eps, out_TH=x_TH)
        return x_TH

    def _add(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        output_norm_H: torch.Tensor | None,
        next_norm_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add a block's output to the residual, and return what the next block reads. May overwrite `x_TH`."""
        eps = self._config.rms_norm_eps
        if self._config.residual_scale != 1.0:
            self._backend.scale(x_TH, self._config.residual_scale)
        if output_norm_H is not None:
            self._backend.rms_norm_add(x_TH, residual_TH, output_norm_H, eps)
            return self._input(residual_TH, next_norm_H)
        assert next_norm_H is not None
        self._backend.add_rms_norm(x_TH, residual_TH, next_norm_H, eps, out_TH=x_TH)
        return x_TH

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        x_TH = self._looked_up(tokens_T)
        if self._embedding_scale != 1.0:
            self._backend.scale(x_TH, self._embedding_scale)
        return x_TH

    def _looked_up(self, tokens_T: torch.Tensor) -> torch.Tensor:
        embedding_VH = self._weights.embedding_VH
        if self._part.size == 1:
            return self._backend.embed(embedding_VH, tokens_T)
        own_T = tokens_T - self._part.first_token
        is_other_T = (own_T < 0) | (own_T >= len(embedding_VH))
        x_TH = self._backend.embed(embedding_VH, own_T.masked_fill_(is_other_T, 0))
        x_TH.masked_fill_(is_other_T[:, None], 0.0)
        self._collective.all_reduce(x_TH)
        return x_TH

    def _project_and_store(
        self,
        layer: LayerWeights,
        x_TH: torch.Tensor,
        cos_sin_MD: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
        adds: Adds | None,
    ) -> torch.Tensor:
        """Store keys and values, and return the queries [T, N, D]."""
        config = self._config
        qkv = self._backend.linear(x_TH, layer.qkv_QH, layer.qkv_bias_Q)
        if adds is not None:
            self._backend.add_lora(qkv, x_TH, adds[0].qkv, adds[1])
        heads_TXD = qkv.view(x_TH.shape[0], config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        if config.whole_qk_norm:
            q_TA, k_TA, _ = split_heads(heads_TXD, config.num_kv_heads)
            for heads, norm_A in ((q_TA, layer.q_norm_D), (k_TA, layer.k_norm_D)):
                assert norm_A is not None
                flat = heads.flatten(1)
                self._backend.rms_norm(flat, norm_A, config.rms_norm_eps, out_TH=flat)
        norms = self._head_norms(layer)
        return self._backend.qk_norm_rope_write(heads_TXD, norms, cos_sin_MD, kv_pool_B2KPD, plan)

    def _attend(
        self,
        layer: LayerWeights,
        q_TND: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
        adds: Adds | None,
    ) -> torch.Tensor:
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
        self._backend.attention(q_TND, kv_pool_B2KPD, plan, scale=self._scale, out_TND=out_TND)
        out_TA = out_TND.flatten(1)
        x_TH = self._backend.linear(out_TA, layer.attention_out_HA, layer.attention_out_bias_H)
        if adds is not None:
            self._backend.add_lora(x_TH, out_TA, adds[0].attention_out, adds[1])
        return x_TH

    def _head_norms(self, layer: LayerWeights) -> HeadNorms | None:
        if layer.q_norm_D is None or layer.k_norm_D is None or self._config.whole_qk_norm:
            return None
        eps = self._config.rms_norm_eps
        return HeadNorms(q_weight_D=layer.q_norm_D, k_weight_D=layer.k_norm_D, eps=eps)

    def _mlp(self, layer: LayerWeights, x_TH: torch.Tensor, adds: Adds | None) -> torch.Tensor:
        """Apply the MLP or the experts. With many tokens, the result may overwrite `x_TH`, but never the residual."""
        if layer.experts is None:
            return self._whole_mlp(layer, x_TH, adds)
        out_TH = self._experts(layer.experts, x_TH)
        if layer.gate_up_2IH is not None:
            out_TH += self._whole_mlp(layer, x_TH, adds)
        return out_TH

    def _whole_mlp(self, layer: LayerWeights, x_TH: torch.Tensor, adds: Adds | None) -> torch.Tensor:
        """Apply the MLP, or a sparse layer's shared expert, to pieces of many tokens."""
        most = self._backend.mlp_rows
        if most is None or len(x_TH) <= most:
            return self._mlp_of(layer, x_TH, adds)
        out_TH = x_TH if self._config.pre_norms else torch.empty_like(x_TH)
        for first in range(0, len(x_TH), most):
            some = None if adds is None else (adds[0], adds[1].part(first, first + most))
            out_TH[first : first + most] = self._mlp_of(layer, x_TH[first : first + most], some)
        return out_TH

    def _experts(self, experts: ExpertWeights, x_TH: torch.Tensor) -> torch.Tensor:
        mixture = self._config.mixture
        assert mixture is not None
        logits_TE = self._backend.linear(x_TH, experts.gate_EH)[:, : mixture.num_experts]
        if mixture.scales_inputs:
            x_TH = x_TH * logits_TE.amax(dim=1, keepdim=True).float().sigmoid().to(x_TH.dtype)
        return self._backend.experts(
            x_TH,
            logits_TE,
            experts.gate_up_E2IH,
            experts.down_EHI,
            top_k=mixture.experts_per_token,
            normalizes=mixture.normalizes,
        )

    def _mlp_of(self, layer: LayerWeights, x_TH: torch.Tensor, adds: Adds | None) -> torch.Tensor:
        assert layer.gate_up_2IH is not None
        assert layer.down_HI is not None
        gate_up_T2I = self._backend.linear(x_TH, layer.gate_up_2IH)
        if adds is not None:
            self._backend.add_lora(gate_up_T2I, x_TH, adds[0].gate_up, adds[1])
        hidden_TI = gate_up_T2I.new_empty(x_TH.shape[0], gate_up_T2I.shape[1] // 2)
        backend = self._backend
        activate = backend.silu_mul if self._config.activation == "silu" else backend.gelu_mul
        activate(gate_up_T2I, out_TI=hidden_TI)
        out_TH = backend.linear(hidden_TI, layer.down_HI)
        if adds is not None:
            backend.add_lora(out_TH, hidden_TI, adds[0].down, adds[1])
        return out_TH


def _within(plan: AttentionPlan, window: int | None) -> AttentionPlan:
    return plan if window is None else plan.windowed(window)
