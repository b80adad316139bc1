"""Changes offered by the page to explore, as calls in Python."""

from collections.abc import Mapping

# The rewrite to a single matrix W_Q W_Kᵀ for every head.
FOLD = "fold(sides=['qk'], keep='folded')"
# The calls of `Model` by name of a what-if, as format strings with the arguments of the what-if. `model` is
# the model before the call.
PYTHON_OF: Mapping[str, str] = {
    "ablate": '.ablate("{0}")',
    "even": '.edit("{0}", "scores", torch.zeros_like)',
    "unscaled": '.edit("{0}", "q", lambda q: q / model["{0}"].layer.outline.semantics.scale)',
    "truncate": '.replace("{0}", W_Q=(U := model["{0}"].qk.svd().U[:, :{1}]) @ U.mT @ model["{0}"].W_Q)',
    "truncate_ov": '.replace("{0}", W_V=(U := model["{0}"].ov.svd().U[:, :{1}]) @ U.mT @ model["{0}"].W_V)',
    "tie": '.tie("{0}", "{1}", "{2}")',
    "one_head": (
        '.edit("{0}", "scores", lambda s: s.sum(1, True).expand_as(s) / s.shape[1]**0.5, together=True)'
    ),
    "exchange": (
        '.replace("{0}", W_Q=model["{1}"].W_Q, W_K=model["{1}"].W_K, W_V=model["{1}"].W_V, '
        'W_O=model["{1}"].W_O).replace("{1}", W_Q=model["{0}"].W_Q, W_K=model["{0}"].W_K, '
        'W_V=model["{0}"].W_V, W_O=model["{0}"].W_O)'
    ),
    "without_positions": ".without_positions()",
    "fold": f'.rewrite("{FOLD}")',
    "rewrite": '.rewrite("{0}")',
}
