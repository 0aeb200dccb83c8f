"""Preference losses: one file and one function each, the loss of each pair.

A loss is a pure function. Its positional parameters are columns, chosen by name; its keyword-only
parameters are the fields of its config class. Columns of P pairs, sums over the trained tokens of
a side (never means; for long answers summed in float64 by the caller):

    policy_chosen_P, policy_rejected_P    log-probs under the policy, with gradient
    ref_chosen_P, ref_rejected_P          log-probs under the reference
    chosen_lengths_P, rejected_lengths_P  int64, trained tokens

A loss without a reference leaves its columns out, and then no reference runs. `kto` reads single
answers instead, S of them: `policy_sum_S`, `ref_sum_S`, `desirable_S` and `kl_baseline`.
"""
