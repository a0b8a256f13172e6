"""Samples of norms: layer, RMS, group, instance, batch, local response."""

import torch
import torch.nn.functional as F

from tests.samples import Sample, T


def batch_norm(training):
    def run(x, mean, var, weight, bias):
        mean, var = mean.detach().clone(), var.detach().abs() + 0.5
        y = F.batch_norm(x, mean, var, weight, bias, training, momentum=0.3)
        return y, mean, var

    return run


def instance_norm_running(x, mean, var):
    mean, var = mean.detach().clone(), var.detach().abs() + 0.5
    return F.instance_norm(x, mean, var, momentum=0.3), mean, var


WEIGHTS = (T("c"), T("c"))
RUNNING = (T("c"), T("c", "positive"))
BOTH = {"c": 6}

LAYER = [
    Sample(
        name="layer_norm",
        function=lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
        inputs=(T("bsc"), *WEIGHTS),
        split="bsc",
        plain=(1, 2),
    ),
    Sample(name="layer_norm without weights", function=lambda x: F.layer_norm(x, (x.shape[-1],)), inputs=(T("bsc"),), split="bsc"),
    Sample(
        name="layer_norm of two dims",
        function=lambda x, w: F.layer_norm(x, tuple(x.shape[1:]), w),
        inputs=(T("bsc"), T("sc")),
        split="bsc",
        plain=(1,),
    ),
    Sample(
        name="torch.layer_norm",
        function=lambda x, w, b: torch.layer_norm(x, (x.shape[-1],), w, b),
        inputs=(T("bsc"), *WEIGHTS),
        split="bc",
        plain=(1, 2),
    ),
    Sample(name="rms_norm", function=lambda x, w: F.rms_norm(x, (x.shape[-1],), w), inputs=(T("bsc"), T("c")), split="bsc", plain=(1,)),
    Sample(name="rms_norm of two dims", function=lambda x: torch.rms_norm(x, tuple(x.shape[1:])), inputs=(T("bsc"),), split="bsc"),
]

GROUP = [
    Sample(
        name="group_norm",
        function=lambda x, w, b: F.group_norm(x, 3, w, b),
        inputs=(T("nchw"), *WEIGHTS),
        split="nhwc",
        plain=(1, 2),
        vary="nhw",
    ),
    Sample(  # a group may have two or three elements, nearly equal: float32 keeps few digits of their gradient
        name="group_norm of a line",
        function=lambda x: F.group_norm(x, 2),
        inputs=(T("ncl"),),
        split="nlc",
        sizes=BOTH,
        vary="nl",
        dtypes=(torch.float64,),
    ),
    Sample(
        name="group_norm of a line with a large eps",
        function=lambda x: F.group_norm(x, 2, eps=0.1),
        inputs=(T("ncl"),),
        split="nlc",
        sizes=BOTH,
        vary="nl",
    ),
    Sample(
        name="torch.group_norm",
        function=lambda x, w, b: torch.group_norm(x, 1, w, b),
        inputs=(T("ncl"), *WEIGHTS),
        split="nl",
        plain=(1, 2),
    ),
    Sample(
        name="instance_norm",
        function=lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        inputs=(T("nchw"), *WEIGHTS),
        split="nhwc",
        plain=(1, 2),
    ),
    Sample(
        name="instance_norm with running statistics", function=instance_norm_running, inputs=(T("ncl"), *RUNNING), split="nlc", plain=(1, 2)
    ),
    Sample(
        name="instance_norm in evaluation",
        function=lambda x, m, v: F.instance_norm(x, m.detach(), v.detach(), use_input_stats=False),
        inputs=(T("ncl"), *RUNNING),
        split="nlc",
        plain=(1, 2),
    ),
    Sample(
        name="torch.instance_norm",
        function=lambda x: torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        inputs=(T("ncl"),),
        split="nl",
    ),
]

BATCH = [
    Sample(
        name="batch_norm in training", function=batch_norm(True), inputs=(T("nchw"), *RUNNING, *WEIGHTS), split="hnwc", plain=(1, 2, 3, 4)
    ),
    Sample(name="batch_norm of a table", function=batch_norm(True), inputs=(T("nc"), *RUNNING, *WEIGHTS), split="nc", plain=(1, 2, 3, 4)),
    Sample(
        name="batch_norm in evaluation",
        function=batch_norm(False),
        inputs=(T("nchw"), *RUNNING, *WEIGHTS),
        split="hnwc",
        plain=(1, 2, 3, 4),
    ),
    Sample(
        name="torch.batch_norm",
        function=lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        inputs=(T("nchw"),),
        split="nh",
    ),
    Sample(name="local_response_norm", function=lambda x: F.local_response_norm(x, 3), inputs=(T("nchw"),), split="nhc"),
    Sample(name="local_response_norm of a line", function=lambda x: F.local_response_norm(x, 2), inputs=(T("ncl"),), split="nlc"),
]

SAMPLES = [*LAYER, *GROUP, *BATCH]
