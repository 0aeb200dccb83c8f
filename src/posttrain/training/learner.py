"""The learner of one process: a batch in, one policy version further.

It knows no algorithm by name: an `Algorithm`'s components turn columns of tokens into a loss, and
name the columns that they read.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from posttrain.algo.algorithm import Algorithm
from posttrain.algo.credit import Memory
from posttrain.config import Recipe
from posttrain.data.packing import pack
from posttrain.data.samples import build_batch
from posttrain.errors import JournalCorruptError
from posttrain.randomness import derive_seed
from posttrain.telemetry.spans import span
from posttrain.training.forward import Comparison, score_hidden
from posttrain.training.frozen import REFERENCE_FILE, FrozenModel, Reference
from posttrain.training.heads import Scorer
from posttrain.training.meter import Meter
from posttrain.training.optimizer import MasterOptimizer, sha256_of
from posttrain.training.policy import Policy
from posttrain.training.schedule import learning_rate
from posttrain.training.token_columns import (
    Columns,
    GlobalCounts,
    Work,
    cut_ends,
    key_of,
    known_columns,
    of_stream,
    prepare_whole_step,
    stream_of,
)
from posttrain.types import Group, Microbatch, StepResult, TrainBatch, TrainSample


class InlineLearner:
    """Implements `protocols.Learner` on the policy's own weights.

    A reference, a teacher, a critic or a reward head is given when the algorithm reads its column.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        recipe: Recipe,
        *,
        reference: Reference | None = None,
        teacher: FrozenModel | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._recipe = recipe
        self._reference = reference
        self._teacher = teacher
        self.scorer = scorer
        self._optimizer = MasterOptimizer(policy, recipe.optim)
        self._version = 0
        self._skipped_in_a_row = 0
        self.memory: Memory = {}

    @property
    def policy_version(self) -> int:
        return self._version

    def step(self, batch: TrainBatch) -> StepResult:
        """Train on the batch: `num_epochs` passes over `num_minibatches` optimizer steps.

        A step without trainable tokens, or with a non-finite loss or gradient, leaves the weights
        alone and says so; of several optimizer steps each is left out for itself. Steps skipped in
        a row for the latter reason are counted in learner/non_finite_in_a_row.
        """
        with self._policy.lock:
            return self._step(batch)

    def _step(self, batch: TrainBatch) -> StepResult:
        started = time.perf_counter()
        meter = Meter()
        lr = learning_rate(self._recipe.optim, batch.step, self._recipe.num_steps)
        skipped = None if batch.num_loss_tokens else "no_trainable_tokens"
        if skipped is None:
            minibatches = self._minibatches(batch)
            updates = minibatches * self._recipe.algo.num_epochs
            moved = []
            for index, works in enumerate(updates):
                to_confirm = minibatches[1:] if index == 0 else ()
                progress = index / len(updates)
                moved.append(self._update(works, batch.step, progress, lr, meter, to_confirm))
            skipped = None if any(moved) else "non_finite"
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped == "non_finite" else 0
        self._version = batch.step
        if skipped is None:
            self._after_step(batch, meter)
        seconds = time.perf_counter() - started
        metrics = meter.result(self._algorithm.components, batch, lr, seconds)
        metrics["learner/non_finite_in_a_row"] = float(self._skipped_in_a_row)
        metrics |= {f"algo/{key}": value for key, value in self.memory.items()}
        with span("weights hash"):
            weights_hash = self.weights_hash()
        return StepResult(batch.step, self._version, weights_hash, metrics, skipped)

    def _after_step(self, batch: TrainBatch, meter: Meter) -> None:
        for component in self._algorithm.components:
            stats = meter.stats(key_of(component))
            num_sequences = sum(component.stream in sample.streams for sample in batch.samples)
            component.after_step(stats, num_sequences, self.memory)
        kl = getattr(self._recipe.algo, "kl", None)
        if kl is None or self._reference is None:
            return
        if kl.reset_every and batch.step % kl.reset_every == 0:
            self._reference.follow(self._policy, 1.0)
            self._optimizer.forget_moments()
        elif kl.sync_every and batch.step % kl.sync_every == 0:
            self._reference.follow(self._policy, kl.sync_mix)

    def _minibatches(self, batch: TrainBatch) -> list[list[Work]]:
        """Optimizer steps of the batch, each with what must be known before the first of them.

        With one optimizer step per batch the proximal policy is the current one: unless a
        component must see the whole step, its log-probs are the detached forward pass and nothing
        is computed here. Nor with several, when the sampler has computed the very same numbers:
        the first update confirms that before anything moves.
        """
        algo = self._recipe.algo
        budget = self._recipe.learner.max_tokens_per_microbatch
        components = self._algorithm.components
        minibatches = [
            [
                Work(micro, known_columns(micro))
                for micro in pack(
                    part,
                    budget,
                    whole_groups=self._algorithm.whole_groups,
                    any_order=not any(c.whole_step for c in components),
                )
            ]
            for part in _split_by_group(batch.samples, algo.num_minibatches)
        ]
        works = [work for works in minibatches for work in works]
        several = algo.num_epochs * algo.num_minibatches > 1
        needs_prox = several and any(c.needs_prox for c in components)
        if any(c.whole_step for c in components) or (
            needs_prox
            and not (_has_labels(minibatches[0]) and self._sampled_by_these_weights(batch))
        ):
            for work in works:
                self._score_without_grad(work)
        elif needs_prox:
            for work in (work for later in minibatches[1:] for work in later):
                work.known["prox_logprobs_N"] = work.known["sampler_logprobs_N"]
        for component in components:
            if component.whole_step:
                prepare_whole_step(component, works, self._constants(batch.step), self.memory)
        return minibatches

    def _sampled_by_these_weights(self, batch: TrainBatch) -> bool:
        """Every trained token, by a sampler that computes what the learner computes."""
        versions = [s.policy_versions[s.loss_mask] for s in batch.samples]
        return self._policy.exact and all((v == self._version).all() for v in versions)

    def _confirm_prox(self, first: Sequence[Work], later: Sequence[Sequence[Work]]) -> None:
        """Score `later` after all, if the sampler's log-probs were not those of these weights."""
        assumed = [w for works in later for w in works if _takes_prox_from_sampler(w)]
        if not assumed or all(
            torch.equal(w.known["prox_logprobs_N"], w.known["sampler_logprobs_N"]) for w in first
        ):
            return
        for work in assumed:
            self._score_without_grad(work)

    @torch.no_grad()
    def _score_without_grad(self, work: Work) -> None:
        """The policy's own scores at the start of the step, and those of frozen models."""
        wanted = self._algorithm.columns
        hidden_TH = self._policy.tree_hidden(work.micro)
        scores = score_hidden(self._policy, hidden_TH, work.micro, self._temperature, wanted)
        work.known["prox_logprobs_N"] = scores.policy_logprobs_N
        if "entropy_N" in wanted:
            work.known["entropy_N"] = scores.entropy_N
        if "sum_pi_squared_N" in wanted and scores.sum_pi_squared_N is not None:
            work.known["sum_pi_squared_N"] = scores.sum_pi_squared_N
        if "values_N" in wanted and self.scorer is not None:
            work.known["values_N"] = self.scorer.read(hidden_TH, work.micro, "predict_rows")
            if self.scorer.bootstraps:
                after_N = self.scorer.read(hidden_TH, work.micro, "own_rows")
                work.known["bootstrap_N"] = torch.where(cut_ends(work.micro), after_N, 0.0)
        self._read_frozen(work)

    def _read_frozen(self, work: Work) -> None:
        """Columns of models that are not trained, once for all passes over the batch."""
        if self._reference is not None and "ref_logprobs_N" not in work.known:
            work.known["ref_logprobs_N"] = self._reference.logprobs(work.micro, self._temperature)
        wanted = self._algorithm.columns
        if (
            self._teacher is not None
            and "teacher_logprobs_N" in wanted
            and "teacher_logprobs_N" not in work.known
        ):
            work.known["teacher_logprobs_N"] = self._teacher.logprobs(work.micro, self._temperature)

    def _update(
        self,
        works: Sequence[Work],
        step: int,
        progress: float,
        lr: float,
        meter: Meter,
        to_confirm: Sequence[Sequence[Work]],
    ) -> bool:
        """One optimizer step, after the share `progress` of the batch's. False when loss or
        gradient was not finite and nothing moved. Before it moves, the proximal log-probs of the
        mini-batches `to_confirm` are checked against those of this one."""
        counts = GlobalCounts(self._algorithm.components, [work.micro for work in works])
        if not counts:
            return False  # a mini-batch of dropped groups
        optimizers = self._optimizers(step)
        for optimizer in self._all_optimizers():
            optimizer.zero_grad()
        loss_sum = 0.0
        for work in works:
            with span("micro-batch", rows=work.micro.num_rows):
                loss = self._loss(work, counts, self._constants(step, progress), meter)
                loss.backward()
                loss_sum += float(loss.detach())
        self._confirm_prox(works, to_confirm)
        norms = [optimizer.grad_norm() for optimizer in optimizers]
        meter.optimizer_step(loss_sum, norms[0])
        if not (math.isfinite(loss_sum) and all(map(math.isfinite, norms))):
            for optimizer in self._all_optimizers():
                optimizer.zero_grad()
            meter.non_finite_updates += 1
            return False
        with span("optimizer"):
            for optimizer, norm in zip(optimizers, norms, strict=True):
                scale = optimizer.config.lr / self._recipe.optim.lr
                optimizer.update(lr * scale, norm)
        return True

    def _loss(
        self, work: Work, counts: GlobalCounts, constants: Columns, meter: Meter
    ) -> torch.Tensor:
        """This micro-batch's share of the loss of all components."""
        micro = work.micro
        self._read_frozen(work)
        now, entropy_N = self._current(work)
        meter.add(micro, self._policy.padded_rows(micro.num_rows), entropy_N)
        total = torch.zeros(())
        for component in self._algorithm.components:
            columns = of_stream({**work.known, **now}, stream_of(component, micro))
            columns |= constants
            if component.whole_step:
                columns |= work.prepared.get(key_of(component), {})
            else:
                columns |= component.prepare(_detached(columns), self.memory)
            if not len(columns["weights_N"]):
                continue
            output = component.loss(columns, counts.denominators(component, micro), self.memory)
            total = total + output.loss
            meter.add_stats(key_of(component), output.stats)
        return total

    def _current(self, work: Work) -> tuple[Columns, torch.Tensor | None]:
        """Columns of the policy as it is, with gradient, and its entropy without."""
        micro, wanted = work.micro, self._algorithm.columns
        hidden_TH = self._policy.tree_hidden(micro)
        now: Columns = {}
        entropy_N = None
        if "policy_logprobs_N" in wanted:
            scores = score_hidden(
                self._policy, hidden_TH, micro, self._temperature, wanted, self._comparison(micro)
            )
            now["policy_logprobs_N"] = scores.policy_logprobs_N
            if "divergence_N" in wanted:
                now["divergence_N"] = scores.divergence_N
            entropy_N = scores.entropy_N.detach()
            if "entropy_N" in wanted:
                now["entropy_N"] = scores.entropy_N
            if "prox_logprobs_N" not in work.known:
                now["prox_logprobs_N"] = scores.policy_logprobs_N.detach()
                work.known["prox_logprobs_N"] = now["prox_logprobs_N"]
        if self.scorer is not None:
            name, rows = _head_column(wanted)
            now[name] = self.scorer.read(hidden_TH, micro, rows)
        return now, entropy_N

    @torch.no_grad()
    def _comparison(self, micro: Microbatch) -> Comparison | None:
        """With what the policy's whole distribution is compared, if a loss asks for it."""
        rule, teacher = self._algorithm.divergence, self._teacher
        if rule is None or teacher is None:
            return None
        return Comparison(teacher.policy, teacher.policy.tree_hidden(micro), rule.on)

    def _constants(self, step: int, progress: float = 0.0) -> Columns:
        """`version`: the policy's own, a fraction above `step` - 1 between the step's updates."""
        seed = derive_seed(self._recipe.seed, "algorithm", step) >> 1
        return {"step": step, "version": step - 1 + progress, "seed": seed}

    @property
    def _temperature(self) -> float:
        return self._recipe.sampler.temperature

    def _optimizers(self, step: int) -> list[MasterOptimizer]:
        """Those that move at this step, the policy's first; a critic may learn alone before."""
        if self.scorer is None:
            return [self._optimizer]
        if step <= self.scorer.pretrain_steps:
            return [self.scorer.optimizer]
        return [self._optimizer, self.scorer.optimizer]

    def _all_optimizers(self) -> list[MasterOptimizer]:
        return [self._optimizer, *([self.scorer.optimizer] if self.scorer else [])]

    @torch.no_grad()
    def judge(self, groups: Sequence[Group]) -> tuple[dict[int, bool], dict[str, float]]:
        """draw id -> whether the model prefers, scores or says what was given, and the metrics of
        the losses on it. Nothing is trained. Groups that the algorithm drops count as wrong.
        """
        verdicts = {group.draw.draw_id: False for group in groups}
        batch = build_batch(self._version + 1, groups, self._algorithm, dict(self.memory))
        budget = self._recipe.learner.max_tokens_per_microbatch
        micros = pack(batch.samples, budget, whole_groups=True)
        counts, meter = GlobalCounts(self._algorithm.components, micros), Meter()
        for micro in micros:
            work = Work(micro, known_columns(micro))
            self._read_frozen(work)
            now, _ = self._current(work)
            for component in self._algorithm.components:
                columns = of_stream({**work.known, **now}, stream_of(component, micro))
                draws = list(dict.fromkeys(draw_id for draw_id, _ in micro.owners))
                verdicts |= dict(zip(draws, component.judge(columns).tolist(), strict=True))
                if not component.whole_step:
                    denominators = counts.denominators(component, micro)
                    output = component.loss(columns, denominators, self.memory)
                    meter.add_stats(key_of(component), output.stats)
        return verdicts, meter.component_metrics(self._algorithm.components)

    @property
    def frozen_parameters(self) -> int:
        """Parameters of models that are held beside the policy and not trained."""
        copies = [m for m in (self._reference, self._teacher) if isinstance(m, FrozenModel)]
        return sum(p.numel() for m in copies for p in m.policy.model.parameters())

    @property
    def masters(self) -> Mapping[str, torch.Tensor]:
        """fp32 weights by parameter name."""
        return self._optimizer.masters

    def policy_hash(self) -> str:
        """SHA-256 of the policy alone: what it is before the first step depends on the model, not
        on the algorithm's critic or head."""
        return self._optimizer.weights_hash()

    def weights_hash(self) -> str:
        own = self.policy_hash()
        return own if self.scorer is None else _joined(own, self.scorer.optimizer.weights_hash())

    def save(self, folder: Path) -> None:
        self._optimizer.save(folder)
        if self.scorer is not None:
            self.scorer.save(folder / "scorer")
        if self._reference is not None:
            self._reference.save(folder)
        state = {
            "policy_version": self._version,
            "skipped_in_a_row": self._skipped_in_a_row,
            "algorithm": self.memory,
            "reference_sha256": None if self._reference is None else _hash_of_reference(folder),
        }
        record = {"state": state, "sha256": _joined(json.dumps(state))}
        (folder / "learner.json").write_text(json.dumps(record))

    def restore(self, folder: Path) -> None:
        self._optimizer.restore(folder)
        if self.scorer is not None:
            self.scorer.restore(folder / "scorer")
        record = json.loads((folder / "learner.json").read_text())
        state = record["state"]
        if _joined(json.dumps(state)) != record["sha256"]:
            raise _damaged(folder, "learner.json")
        if self._reference is not None:
            if _hash_of_reference(folder) != state["reference_sha256"]:
                raise _damaged(folder, REFERENCE_FILE)
            self._reference.restore(folder)
        self._version = state["policy_version"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self.memory = state["algorithm"]


def _head_column(wanted: frozenset[str]) -> tuple[str, str]:
    """What the scalar head is read as, and at which rows."""
    if "scores_N" in wanted:
        return "scores_N", "own_rows"
    return "values_N", "predict_rows"


def _has_labels(works: Sequence[Work]) -> bool:
    return any(len(work.micro.labels) for work in works)


def _takes_prox_from_sampler(work: Work) -> bool:
    return work.known.get("prox_logprobs_N") is work.known["sampler_logprobs_N"]


def _detached(columns: Columns) -> Columns:
    return {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in columns.items()}


def _hash_of_reference(folder: Path) -> str | None:
    """None for a reference that is the initial model and needs no file."""
    path = folder / REFERENCE_FILE
    return sha256_of(path) if path.is_file() else None


def _damaged(folder: Path, name: str) -> JournalCorruptError:
    return JournalCorruptError(
        f"checkpoint {folder}: {name} does not match its recorded hash; delete that folder and "
        "resume: the steps since an earlier one are redone from the journal"
    )


def _joined(*hashes: str) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _split_by_group(
    samples: Sequence[TrainSample], num_parts: int
) -> Iterator[Sequence[TrainSample]]:
    """Cut into parts without splitting the siblings of a draw."""
    draws = list(dict.fromkeys(s.draw_id for s in samples))
    for part in np.array_split(np.asarray(draws, dtype=np.int64), num_parts):
        chosen = set(part.tolist())
        yield [s for s in samples if s.draw_id in chosen]
