"""The registry of metric names. A metric that is not declared here is an error.

Names are `group/name_unit`; `_s` seconds, `_frac` fractions of 1, `_max` maxima, else counts or
means in the metric's own unit.
"""

from __future__ import annotations

from collections.abc import Mapping

METRICS: Mapping[str, str] = {
    "reward/mean": "mean reward of all valid trajectories of the step, before any filter",
    "reward/std": "their standard deviation, unbiased",
    "accuracy/train": "share of valid trajectories that are correct",
    "groups/zero_variance_frac": "groups whose rewards are all equal",
    "groups/all_low_frac": "zero-variance groups in which none is correct, of all groups",
    "groups/all_high_frac": "zero-variance groups in which all are correct, of all groups",
    "groups/invalid_frac": "groups dropped because too few members were valid",
    "trajectories/invalid_frac": "trajectories without a reward",
    "response/len_mean": "sampled tokens of a trajectory",
    "response/len_p95": "their 95th percentile",
    "response/truncated_frac": "trajectories cut by length, context or turns",
    "response/unparsed_frac": "valid trajectories in which no answer was found",
    "advantage/mean": "mean advantage over trained tokens",
    "advantage/positive_frac": "trained tokens with a positive advantage",
    "advantage/nonzero_frac": "trained tokens with an advantage that is not 0",
    "policy/entropy_mean": "entropy of the sampled distribution over trained tokens, nats",
    "policy/lag_max": "steps between sampling and training of the oldest token",
    "policy/ratio_mean": "exp(policy - prox) over trained tokens",
    "policy/ratio_max": "its maximum",
    "policy/clip_low_frac": "trained tokens whose lower clip is active",
    "policy/clip_high_frac": "trained tokens whose upper clip is active",
    "policy/kl_k1": "KL(prox || policy), estimator k1, nats",
    "policy/kl_k3": "KL(prox || policy), estimator k3, nats",
    "mismatch/mean": "prox - sampler log-prob: the learner's against the sampler's",
    "mismatch/abs_mean": "mean absolute mismatch; 0 when both computed the same bits",
    "mismatch/abs_max": "largest absolute mismatch",
    "mismatch/k3": "KL(sampler || prox), estimator k3, nats",
    "mismatch/weight_mean": "exp(prox - sampler); its mean is 1 when both agree",
    "mismatch/weight_max": "its maximum",
    "mismatch/ess_frac": "effective sample size of these weights over the token count",
    "reference/kl_k1": "KL(policy || reference) per token, estimator k1, nats",
    "reference/kl_k3": "KL(policy || reference) per token, estimator k3, nats",
    "correction/mean": "off-policy weight that multiplied the loss, mean over tokens",
    "correction/rejected_frac": "trained tokens whose weight is 0",
    "value/loss": "value loss per token",
    "value/return_mean": "mean of the critic's targets",
    "value/explained_variance": "1 - var(target - value) / var(target), before the update",
    "imitation/nll": "negative log-likelihood of imitated tokens, nats per token",
    "hindsight/nll": "the same of answers under the tasks they solve",
    "preference/loss": "loss of a pair",
    "preference/margin": "chosen less rejected: log-ratio to the reference, or score",
    "preference/accuracy": "pairs whose margin is above 0",
    "preference/chosen_logprob": "log-prob of the chosen side, summed over its tokens",
    "preference/rejected_logprob": "the same of the rejected side",
    "preference/score_mean": "mean score of both sides",
    "distill/reverse_kl": "KL(student || teacher) per token, from the sampled tokens, nats",
    "distill/divergence": "divergence of student and teacher per token, nats",
    "learner/loss": "loss of the step; about 0 on-policy by construction",
    "learner/grad_norm": "global L2 norm before clipping, the largest of the step's updates",
    "learner/lr": "learning rate",
    "learner/tokens": "tokens of all samples and passes, shared ones counted for each",
    "learner/shared_frac": "share of them computed once for several samples",
    "learner/padding_frac": "share of computed rows that are padding or computed a second time",
    "learner/loss_tokens": "trained tokens",
    "learner/non_finite_in_a_row": "steps skipped in a row because loss or gradient was not finite",
    "learner/non_finite_updates": "optimizer steps of the batch left out for that",
    "learner/microbatches": "forward passes",
    "learner/tok_per_s": "learner/tokens a second",
    "learner/step_s": "seconds in the optimizer step",
    "sampler/tokens": "sampled tokens",
    "sampler/prefill_tokens": "prompt tokens computed; equal prompts count once",
    "sampler/cached_tokens": "prompt tokens whose keys were there from earlier requests",
    "sampler/kv_frac": "largest share of the room for keys that was in use",
    "sampler/preemptions": "sequences whose keys were given up for others and computed again",
    "sampler/waiting_max": "most requests that waited for room",
    "memory/resident_bytes": "resident memory of this process after the step",
    "memory/peak_bytes": "the most that was resident since this process began",
    "sampler/busy_s": "seconds in the engine",
    "sampler/tok_per_s": "sampled tokens a second of engine time",
    "time/rollout_s": "seconds waiting for groups, generation and grading included",
    "time/learner_s": "seconds in the learner, hash of the weights included",
    "time/other_s": "seconds in neither: batch, journal, and the checkpoint of the step before",
    "time/step_s": "seconds between two records of a step, evaluation left out",
}
PREFIXES: Mapping[str, str] = {
    "trajectories/invalid/": "how many trajectories have no reward for this reason",
    "algo/": "what the algorithm remembers: adapted coefficients, moving baselines",
    "env/": "reward and accuracy of one environment of a mixture",
    "reward/term/": "mean of a reward component over the trajectories that carry it",
}


def check_names(metrics: Mapping[str, float]) -> None:
    """Raise ValueError for a name that is not declared."""
    for name in metrics:
        if name not in METRICS and not any(name.startswith(p) for p in PREFIXES):
            raise ValueError(f"metric {name!r} is not declared in posttrain.telemetry.metrics")
