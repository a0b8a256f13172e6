"""Samples of losses: by element, by row of classes."""

import torch
import torch.nn.functional as F

from tests.samples import Sample, T

aten = torch.ops.aten
TARGET = T("n", "index", "c")
PIXELS = T("nhw", "index", "c")


def each_reduction(name, loss, inputs, split, reductions=("none", "mean", "sum"), **options):
    def run(*tensors):
        return [loss(*tensors, reduction=reduction) for reduction in reductions]

    return Sample(name=name, function=run, inputs=inputs, split=split, **options)


def by_element(loss, *kinds, name=None, split="nc", **options):
    return each_reduction(name or loss.__name__, loss, tuple(T("nc", kind) for kind in kinds), split, **options)


def sign(x):
    return torch.where(x > 0, 1.0, -1.0).to(x.dtype)


def ignoring(target):
    return torch.where(target == 0, -100, target)


ELEMENTS = [
    by_element(F.mse_loss, "normal", "normal"),
    by_element(F.l1_loss, "normal", "normal"),
    by_element(F.smooth_l1_loss, "normal", "normal"),
    by_element(F.huber_loss, "normal", "normal"),
    by_element(
        lambda x, y, w, reduction: F.mse_loss(x, y, weight=w, reduction=reduction), "normal", "normal", "positive", name="weighted mse_loss"
    ),
    by_element(
        lambda x, y, reduction: F.mse_loss(x, y.detach(), reduction=reduction),
        "normal",
        "normal",
        name="mse_loss of a plain target",
        plain=(1,),
    ),
    by_element(
        lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
        "normal",
        "normal",
        name="binary_cross_entropy",
    ),
    by_element(
        lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=reduction),
        "normal",
        "normal",
        name="binary_cross_entropy_with_logits",
    ),
    each_reduction(
        "binary_cross_entropy_with_logits with pos_weight",
        lambda x, y, w, reduction: F.binary_cross_entropy_with_logits(x, y.detach(), pos_weight=w.detach(), reduction=reduction),
        (T("nc"), T("nc", "positive"), T("c", "positive")),
        "nc",
        plain=(2,),
    ),
    by_element(
        lambda x, y, reduction: F.kl_div(x.log_softmax(1), y.softmax(1), reduction=reduction),
        "normal",
        "normal",
        name="kl_div",
        reductions=("none", "mean", "sum", "batchmean"),
    ),
    by_element(lambda x, y, reduction: F.kl_div(x, y, log_target=True, reduction=reduction), "normal", "normal", name="kl_div of logs"),
    by_element(F.poisson_nll_loss, "normal", "positive"),
    by_element(F.gaussian_nll_loss, "normal", "normal", "positive"),
    by_element(lambda x, y, reduction: F.soft_margin_loss(x, sign(y), reduction=reduction), "normal", "normal", name="soft_margin_loss"),
    by_element(
        lambda x, y, reduction: F.hinge_embedding_loss(x, sign(y), reduction=reduction), "normal", "normal", name="hinge_embedding_loss"
    ),
    by_element(
        lambda x, y, z, reduction: F.margin_ranking_loss(x, y, sign(z), margin=0.1, reduction=reduction),
        "normal",
        "normal",
        "normal",
        name="margin_ranking_loss",
    ),
    by_element(
        lambda x, y, reduction: F.multilabel_soft_margin_loss(x, (y > 0).to(x.dtype), reduction=reduction),
        "normal",
        "normal",
        name="multilabel_soft_margin_loss",
    ),
    each_reduction(
        "cosine_embedding_loss",
        lambda x, y, z, reduction: F.cosine_embedding_loss(x, y, sign(z), margin=0.1, reduction=reduction),
        (T("nc"), T("nc"), T("n")),
        "nc",
    ),
    by_element(F.triplet_margin_loss, "normal", "normal", "normal"),
    by_element(F.triplet_margin_with_distance_loss, "normal", "normal", "normal"),
    Sample(
        name="old spelling of reductions",
        function=lambda x, y: (F.mse_loss(x, y, size_average=False), F.l1_loss(x, y, reduce=False)),
        inputs=(T("nc"), T("nc")),
        split="n",
    ),
    Sample(
        name="operators of losses",
        split="nc",
        inputs=(T("nc"), T("nc")),
        function=lambda x, y: [
            op(x, sign(y.detach()), reduction=r)
            for r in (0, 1, 2)
            for op in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss, aten.binary_cross_entropy_with_logits)
        ],
    ),
    Sample(
        name="operator of binary cross entropy",
        split="nc",
        inputs=(T("nc"), T("nc")),
        function=lambda x, y: [aten.binary_cross_entropy(x.sigmoid(), y.detach().sigmoid(), reduction=r) for r in (0, 1, 2)],
    ),
]

CROSS_ENTROPY = [
    each_reduction("cross_entropy", F.cross_entropy, (T("nc"), TARGET), "nc"),
    each_reduction("cross_entropy of a plain target", F.cross_entropy, (T("nc"), TARGET), "nc", plain=(1,)),
    each_reduction("cross_entropy of pixels", F.cross_entropy, (T("nchw"), PIXELS), "hcwn"),
    each_reduction(
        "cross_entropy with ignored targets",
        lambda x, t, reduction: F.cross_entropy(x, ignoring(t), reduction=reduction),
        (T("nc"), TARGET),
        "nc",
    ),
    each_reduction(
        "weighted cross_entropy",
        lambda x, t, w, reduction: F.cross_entropy(x, ignoring(t), w.detach(), reduction=reduction),
        (T("nch"), T("nh", "index", "c"), T("c", "positive")),
        "nch",
        plain=(2,),
    ),
    each_reduction(
        "smoothed cross_entropy",
        lambda x, t, reduction: F.cross_entropy(x, ignoring(t), label_smoothing=0.2, reduction=reduction),
        (T("nc"), TARGET),
        "nc",
    ),
    each_reduction(
        "weighted and smoothed cross_entropy",
        lambda x, t, w, reduction: F.cross_entropy(x, ignoring(t), w.detach(), label_smoothing=0.2, reduction=reduction),
        (T("nc"), TARGET, T("c", "positive")),
        "nc",
        plain=(2,),
    ),
    each_reduction(
        "cross_entropy of probabilities",
        lambda x, t, reduction: F.cross_entropy(x, t.softmax(1), reduction=reduction),
        (T("nch"), T("nch")),
        "nch",
    ),
    each_reduction(
        "weighted and smoothed cross_entropy of probabilities",
        lambda x, t, w, reduction: F.cross_entropy(x, t, w.detach(), label_smoothing=0.1, reduction=reduction),
        (T("nc"), T("nc", "positive"), T("c", "positive")),
        "nc",
        plain=(2,),
    ),
    Sample(name="cross_entropy of one row", function=lambda x: F.cross_entropy(x, torch.tensor(2)), inputs=(T("c"),), split="c", vary=""),
    each_reduction("nll_loss", F.nll_loss, (T("nc"), TARGET), "nc"),
    each_reduction(
        "weighted nll_loss of pixels",
        lambda x, t, w, reduction: F.nll_loss(x, ignoring(t), w.detach(), reduction=reduction),
        (T("nchw"), PIXELS, T("c", "positive")),
        "hcn",
        plain=(2,),
    ),
    each_reduction(
        "linear_cross_entropy",
        lambda x, w, t, reduction: F.linear_cross_entropy(x, w, t, reduction=reduction),
        (T("nk"), T("ck"), TARGET),
        "n",
        plain=(1,),
    ),
    each_reduction("multi_margin_loss", lambda x, t, reduction: F.multi_margin_loss(x, t, reduction=reduction), (T("nc"), TARGET), "nc"),
    each_reduction(
        "multilabel_margin_loss",
        lambda x, t, reduction: F.multilabel_margin_loss(x, t - 1, reduction=reduction),
        (T("nc"), T("nc", "index", "c")),
        "nc",
    ),
]

SAMPLES = [*ELEMENTS, *CROSS_ENTROPY]
