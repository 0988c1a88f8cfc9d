// Metrics in words: a name, what it is, and which way is better. docs/method.md has the mathematics.

const MASKS = {
  ci_masked: "importance-masked", stochastic: "stochastic masks", rounded: "rounded importances", unmasked: "all components", random: "random masks", zero: "all ablated", target: "the target",
};

const OUTPUT = { ce: ["CE", "cross-entropy of the next token, nats"], kl: ["KL", "KL divergence from the target's output, nats"], mse: ["MSE", "mean squared error of the output"] };

/** Patterns of names; each gives `{name, is, better}` from the parts that it captures. The first that fits is taken. */
const METRICS = [
  [/^nontarget\/(.+)$/, ([, key]) => { const { name, is, better } = worded(key); return [`${name}, non-target data`, is, better]; }],
  [/^loss\/total$/, () => ["total loss", "the weighted sum of all losses, on the batch of the step", "low"]],
  [/^loss\/(.+)$/, ([, term]) => [spoken(term), LOSSES[term] ?? "a term of the loss, on the batch of the step", "low"]],
  [/^eval\/loss\/(.+)$/, ([, term]) => [`${spoken(term)}, held out`, LOSSES[term] ?? "a loss on held-out data", "low"]],
  [/^(?:eval|start)\/(ce|kl|mse)\/target$/, ([, kind]) => [`${OUTPUT[kind][0]} of the target`, OUTPUT[kind][1], ""]],
  [/^(?:eval|start)\/(ce|kl|mse)\/(\w+)$/, ([, kind, masks]) => [`${OUTPUT[kind][0]}, ${MASKS[masks] ?? spoken(masks)}`, OUTPUT[kind][1], /zero|random/.test(masks) ? "" : "low"]],
  [/^eval\/(ce|mse|kl)_unrecovered\/(\w+)$/, ([, kind, masks]) => [`lost ${OUTPUT[kind][0]}, ${MASKS[masks] ?? spoken(masks)}`, "part of what ablating everything loses: 0 if nothing is lost", "low"]],
  [/^eval\/ce_difference\/(\w+)$/, ([, masks]) => [`CE above the target's, ${MASKS[masks] ?? spoken(masks)}`, "cross-entropy minus the target's, nats", "low"]],
  [/^l0(?:\/|$)/, () => ["active components (L0) of the step", "components whose importance exceeds eval.alive_threshold, a position of the batch", "low"]],
  [/^eval\/l0(?:\/|$)/, () => ["active components (L0)", "components whose importance exceeds eval.alive_threshold, a position", "low"]],
  [/^eval\/l0_above_([\d.]+)(?:\/|$)/, ([, least]) => [`components above ${least}`, `components of importance above ${least}, a position`, "low"]],
  [/^eval\/hidden_acts\/(\w+)/, ([, masks]) => [`error of inputs, ${MASKS[masks] ?? spoken(masks)}`, "squared error of the input of a site", "low"]],
  [/^eval\/site_outputs\/(\w+)/, ([, masks]) => [`error of outputs, ${MASKS[masks] ?? spoken(masks)}`, "squared error of the output of a site", "low"]],
  [/^eval\/attention_patterns\/(\w+)/, ([, masks]) => [`attention, ${MASKS[masks] ?? spoken(masks)}`, "KL divergence of a query's attention, nats", "low"]],
  [/^eval\/faithfulness$/, () => ["faithfulness", "mean squared weight that the components leave over", "low"]],
  [/^eval\/ci_error(_0p2)?(?:\/|$)/, ([, wide]) => [`importance errors${wide ? ", tolerance 0.2" : ""}`, "importances that contradict the known solution", "low"]],
  [/^eval\/matched(_0p2)?(?:\/|$)/, ([, wide]) => [`matched features${wide ? ", tolerance 0.2" : ""}`, "features with a component of their own", "high"]],
  [/^eval\/mmcs(?:\/|$)/, () => ["similarity (MMCS)", "largest cosine of a component with each column of the weight, mean", "high"]],
  [/^eval\/ml2r(?:\/|$)/, () => ["length ratio (ML2R)", "length of that component over the column's; 1 is perfect", "one"]],
  [/^eval\/effective_units(?:\/|$)/, () => ["effective units of a component", "square of the sum of its lengths in the neurons or heads over the sum of their squares", "low"]],
  [/^eval\/units(?:\/|$)/, () => ["units of a component", "neurons or heads that a component acts through", "low"]],
  [/^eval\/well_tempered\/(.+)$/, ([, region]) => [`order of effects, logits ${spoken(region)}`, "pairs of components of which the one of the higher logit has the larger effect; chance is 0.5", "high"]],
  [/^eval\/subset(?:_worst)?\/(?:.+\/)?(ce|kl|mse)$/, ([, kind]) => [`${OUTPUT[kind][0]}, stochastic masks`, OUTPUT[kind][1], "low"]],
  [/^eval\/adversary\/(\w+)$/, ([, term]) => [`loss under the adversary of ${spoken(term)}`, "distance of the output under the sources of training rows", "low"]],
  [/^eval\/adversary\/(\w+)\//, ([, term]) => [`error of outputs, adversary of ${spoken(term)}`, "squared error of the output of a site under the sources of training rows", "low"]],
  [/^eval\/ladder\/(\d+)$/, ([, steps]) => [`loss under an adversary of ${steps} steps`, "distance of the output under a fresh adversary", "low"]],
  [/^grad_norm(?:\/(\w+))?/, ([, of]) => [`norm of the gradient${of ? `, ${spoken(of)}` : ""}`, "of the step", ""]],
  [/^lr(_importance)?$/, ([, of]) => [`learning rate${of ? " of the importance functions" : ""}`, "of the step", ""]],
  [/^source_lr\/(.+)$/, ([, term]) => [`learning rate of sources, ${spoken(term)}`, "of the step", ""]],
  [/^adv_fraction\/(.+)$/, ([, term]) => [`attacked part, ${spoken(term)}`, "part of the batch that the adversary attacks", ""]],
  [/^p$/, () => ["exponent p", "of the penalty of importances, of the step", ""]],
  [/^gamma$/, () => ["gamma", "importances well above it count fully in smooth L0, of the step", ""]],
];

const LOSSES = {
  faithfulness: "mean squared weight that the components leave over", importance_minimality: "sum of the importances to the power p: how many components matter",
  smooth_l0: "number of importances well above gamma, made smooth", frequency: "how often components are important, more than in proportion",
  stochastic_recon: "distance of the output with random masks above the importances", stochastic_recon_layerwise: "the same with one site masked at a time",
  stochastic_recon_subset: "the same with a random subset of the sites masked", ci_masked_recon: "distance of the output with importances as masks",
};

const spoken = name => name.replaceAll("_", " ");

/** A metric in words; `better` is "low", "high", "one" or "" where neither is. */
function worded(key) {
  for (const [pattern, words] of METRICS) {
    const found = pattern.exec(key);
    if (!found) continue;
    const [name, is, better] = words(found);
    return { name, is, better };
  }
  return { name: spoken(nameIn("eval", key)), is: "", better: "" };
}

const BETTER = { low: "↓", high: "↑", one: "→ 1" };

/** What a metric is and which way is better, as a sentence. */
const defined = key => {
  const { is, better } = worded(key);
  return [is, { low: "lower is better", high: "higher is better", one: "1 is best" }[better]].filter(Boolean).join("; ");
};
