"""Samples of pointwise ops, products, views and factories."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.samples import FLOATS, Sample, T

aten = torch.ops.aten
INTEGERS = (*FLOATS, torch.int64)


def unary(*functions, kind="normal", dtypes=FLOATS):
    return [Sample(name=f.__name__, function=f, inputs=(T("nc", kind),), split="nc", dtypes=dtypes) for f in functions]


def binary(*functions, kind="normal", dtypes=FLOATS):
    return [Sample(name=f.__name__, function=f, inputs=(T("nc", kind), T("nc", kind)), split="nc", dtypes=dtypes) for f in functions]


POINTWISE = [
    *unary(torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.exp, torch.relu, F.gelu, F.silu, F.softplus, F.leaky_relu, F.elu),
    *unary(F.hardswish, F.logsigmoid, torch.erf, torch.sign, torch.floor, torch.expm1, torch.square),
    *unary(torch.neg, torch.abs, dtypes=INTEGERS),
    *unary(torch.sqrt, torch.rsqrt, torch.log, torch.log1p, torch.reciprocal, kind="positive"),
    *unary(torch.asin, torch.atanh, kind="unit"),
    *binary(torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, dtypes=INTEGERS),
    *binary(torch.div, torch.atan2, torch.hypot, kind="positive"),
    *binary(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, dtypes=INTEGERS),
    Sample(name="operators", function=lambda x, y: (x + y) * y - x / (y * y + 1), inputs=(T("nc"), T("nc")), split="nc"),
    Sample(name="operators with numbers", function=lambda x: 2 - (3 + x * 2) / 4 + x**2 - 1.5 * x, inputs=(T("nc"),), split="nc"),
    Sample(name="add with alpha", function=lambda x, y: torch.add(x, y, alpha=3), inputs=(T("nc"), T("nc")), split="nc"),
    Sample(name="broadcast row", function=lambda x, y: x * y + y, inputs=(T("nc"), T("c")), split="nc"),
    Sample(name="broadcast column", function=lambda x, y: x - y.unsqueeze(1), inputs=(T("nc"), T("n")), split="nc"),
    Sample(name="broadcast both", function=lambda x, y: x.unsqueeze(1) + y, inputs=(T("n"), T("c")), split="nc"),
    Sample(name="plain operand", function=lambda x, y: x * y + y, inputs=(T("nc"), T("nc")), split="nc", plain=(1,)),
    Sample(name="plain number tensor", function=lambda x, y: x * y, inputs=(T("nc"), T("")), split="nc", plain=(1,)),
    Sample(name="where", function=torch.where, inputs=(T("nc", "bool"), T("nc"), T("nc")), split="nc"),
    Sample(name="masked_fill", function=lambda x, m: x.masked_fill(m, -1.0), inputs=(T("nc"), T("nc", "bool")), split="nc"),
    Sample(name="logical", function=lambda x, y: (x & y) | ~x ^ y, inputs=(T("nc", "bool"), T("nc", "bool")), split="nc"),
    Sample(name="comparison with a number", function=lambda x: (x > 0).to(x.dtype) * x, inputs=(T("nc"),), split="nc"),
    Sample(name="clamp", function=lambda x: x.clamp(-0.5, 0.5), inputs=(T("nc"),), split="nc"),
    Sample(name="to float32", function=lambda x: x.float() * 2, inputs=(T("nc"),), split="nc", dtypes=(torch.float64,)),
    Sample(name="mixed dtypes", function=lambda x, y: x + y, inputs=(T("nc"), T("nc", "index", 9)), split="nc"),
    Sample(name="lerp", function=lambda x, y: torch.lerp(x, y, 0.3), inputs=(T("nc"), T("nc")), split="nc"),
    Sample(name="addcmul", function=torch.addcmul, inputs=(T("nc"), T("nc"), T("nc")), split="nc"),
    Sample(
        name="in-place activations",
        function=lambda x: [f(x * 1) for f in (partial(F.hardswish, inplace=True), partial(F.mish, inplace=True), F.relu6, Tensor.abs_)],
        inputs=(T("nc"),),
        split="nc",
    ),
    Sample(
        name="in-place comparisons",
        function=lambda x, y: (x.clone().ge_(0.1), x.clone().lt_(y), x.clone().copysign_(y)),
        inputs=(T("nc"), T("nc")),
        split="nc",
        grads=False,
    ),
    Sample(
        name="floor division",
        function=lambda x, y: (x // y, x.floor_divide(2), x.clone().floor_divide_(y)),
        inputs=(T("nc"), T("nc")),
        split="nc",
        grads=False,
    ),
    Sample(name="glu", function=lambda x: (F.glu(x, 1), F.glu(x)), inputs=(T("ncl"),), split="nc", sizes={"l": 4}, vary="n"),
    Sample(name="bilinear", function=F.bilinear, inputs=(T("nbi"), T("nbj"), T("kij"), T("k")), split="nb", plain=(2, 3)),
    Sample(name="dist", function=lambda x, y: (torch.dist(x, y), x.dist(y, 3)), inputs=(T("nc"), T("nc")), split="nc"),
    Sample(name="rsub", function=torch.rsub, inputs=(T("nc"), T("nc")), split="nc"),
    Sample(name="frexp", function=torch.frexp, inputs=(T("nc"),), split="nc", grads=False),
    Sample(name="in-place add and mul", function=lambda x, y: x.clone().add_(y).mul_(2), inputs=(T("nc"), T("nc")), split="nc"),
]

PRODUCTS = [
    Sample(name="linear", function=F.linear, inputs=(T("bsc"), T("oc"), T("o")), split="bs", plain=(1, 2)),
    Sample(name="linear without bias", function=F.linear, inputs=(T("bsc"), T("oc")), split="bsc", plain=(1,)),
    Sample(name="mm", function=torch.mm, inputs=(T("mk"), T("kn")), split="mkn"),
    Sample(name="mm with a plain operand", function=torch.mm, inputs=(T("mk"), T("kn")), split="mk", plain=(1,)),
    Sample(name="matmul operator", function=lambda x, y: x @ y, inputs=(T("bmk"), T("bkn")), split="mbkn"),
    Sample(name="matmul of a plain left", function=lambda x, y: x @ y, inputs=(T("mk"), T("bkn")), split="bkn", plain=(0,)),
    Sample(name="matmul", function=torch.matmul, inputs=(T("bmk"), T("kn")), split="bmkn"),
    Sample(name="mv", function=torch.mv, inputs=(T("mk"), T("k")), split="mk"),
    Sample(name="dot", function=torch.dot, inputs=(T("n"), T("n")), split="n"),
    Sample(name="vdot", function=torch.vdot, inputs=(T("n"), T("n")), split="n"),
    Sample(name="bmm", function=torch.bmm, inputs=(T("bmk"), T("bkn")), split="bmkn"),
    Sample(name="addmm", function=torch.addmm, inputs=(T("n"), T("mk"), T("kn")), split="mkn"),
    Sample(name="addmv", function=torch.addmv, inputs=(T("m"), T("mk"), T("k")), split="mk"),
    Sample(name="baddbmm", function=torch.baddbmm, inputs=(T("bmn"), T("bmk"), T("bkn")), split="bmkn"),
    Sample(name="einsum of channels", function=lambda x, w: torch.einsum("nchw,cd->ndhw", x, w), inputs=(T("nchw"), T("cd")), split="hwc"),
    Sample(name="einsum of points", function=lambda x, y: torch.einsum("bnc,bnd->bcd", x, y), inputs=(T("bnc"), T("bnd")), split="nb"),
]

VIEWS = [
    Sample(name="view splits a dim", function=lambda x: x.view(x.shape[0], 2, -1), inputs=(T("nc"),), split="nc", vary="n"),
    Sample(name="view merges dims", function=lambda x: x.view(-1, x.shape[-1]), inputs=(T("bnc"),), split="bnc"),
    Sample(name="reshape", function=lambda x: x.reshape(x.shape[0] * x.shape[1]), inputs=(T("nc"),), split="nc"),
    Sample(name="flatten", function=lambda x: x.flatten(1), inputs=(T("nchw"),), split="nhw", sizes={"w": 4}),
    Sample(name="unflatten", function=lambda x: x.unflatten(-1, (3, -1)), inputs=(T("nc"),), split="nc", vary="n"),
    Sample(name="permute", function=lambda x: x.permute(2, 0, 1) * 2, inputs=(T("bnc"),), split="bnc"),
    Sample(name="transpose", function=lambda x: x.transpose(0, 1), inputs=(T("nc"),), split="nc"),
    Sample(name="t", function=lambda x: x.t(), inputs=(T("nc"),), split="nc"),
    Sample(name="transpose then contiguous then view", function=lambda x: x.transpose(1, 2).contiguous().view(x.shape[0], -1),
           inputs=(T("bnc"),), split="bnc"),
    Sample(name="unsqueeze", function=lambda x: x.unsqueeze(1), inputs=(T("nc"),), split="nc"),
    Sample(name="squeeze", function=lambda x: (x.squeeze(1), x.squeeze(), x.squeeze((0, 1))), inputs=(T("nic"),), split="nc",
           sizes={"i": 1}, vary=""),
    Sample(name="expand", function=lambda x: x.unsqueeze(0).expand(4, -1, -1), inputs=(T("nc"),), split="nc"),
    Sample(name="chunk", function=lambda x: x.chunk(3, dim=1), inputs=(T("nc"),), split="nc", vary="n"),
    Sample(name="split", function=lambda x: x.split(5, dim=0), inputs=(T("nc"),), split="nc", vary="c"),
    Sample(name="split with sizes", function=lambda x: x.split((1, 0, x.shape[0] - 1), dim=0), inputs=(T("nc"),), split="nc"),
    Sample(name="unsafe split", function=lambda x: (x.unsafe_chunk(3, 1), x.unsafe_split_with_sizes((2, x.shape[0] - 2))),
           inputs=(T("nc"),), split="nc", vary=""),
    Sample(name="unbind", function=lambda x: x.unbind(1), inputs=(T("nck"),), split="nk"),
    Sample(name="cat", function=lambda x, y: torch.cat((x, y, x), dim=1), inputs=(T("nc"), T("nd")), split="ncd"),
    Sample(name="stack", function=lambda x, y: torch.stack((x, y), dim=1), inputs=(T("nc"), T("nc")), split="nc"),
    Sample(name="narrow", function=lambda x: x.narrow(0, 1, x.shape[0] - 1), inputs=(T("nc"),), split="nc"),
    Sample(name="slice", function=lambda x: (x[2:7], x[:, 1:], x[::2]), inputs=(T("nc"),), split="nc"),
    Sample(name="select", function=lambda x: (x[0], x[:, -1], x.select(1, 0)), inputs=(T("nck"),), split="nck"),
    Sample(name="view as another dtype", function=lambda x: x.detach().view(torch.int64), inputs=(T("nc"),), split="nc",
           dtypes=(torch.float64,)),
    Sample(name="view as complex", function=lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), inputs=(T("nci"),), split="nc",
           sizes={"i": 2}),
]  # fmt: skip

FACTORIES = [
    Sample(name="like", function=lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 7)), inputs=(T("nc"),), split="nc"),
    Sample(name="new", function=lambda x: (x.new_zeros(x.shape), x.new_ones(3), x.new_full((2, 3), 4)), inputs=(T("nc"),), split="nc"),
]

# What autograd and compiled code call below the functions above.
OPERATORS = [
    Sample(name="aten.mm", function=aten.mm.default, inputs=(T("mk"), T("kn")), split="mkn"),
    Sample(name="aten.mv", function=aten.mv.default, inputs=(T("mk"), T("k")), split="mk"),
    Sample(name="aten.bmm", function=aten.bmm.default, inputs=(T("bmk"), T("bkn")), split="bmkn"),
    Sample(name="aten.addmm", function=aten.addmm.default, inputs=(T("n"), T("mk"), T("kn")), split="mkn"),
    Sample(name="aten.addmv", function=aten.addmv.default, inputs=(T("m"), T("mk"), T("k")), split="mk"),
    Sample(name="aten.baddbmm", function=aten.baddbmm.default, inputs=(T("bmn"), T("bmk"), T("bkn")), split="bmkn"),
    Sample(name="aten.linear", function=aten.linear.default, inputs=(T("bsc"), T("oc"), T("o")), split="bs"),
    Sample(name="aten.alias", function=lambda x: aten.alias.default(x) * 2, inputs=(T("nc"),), split="nc"),
    Sample(name="aten.reshape", function=lambda x: aten.reshape.default(x, (-1,)), inputs=(T("nc"),), split="nc"),
    Sample(name="aten.unsafe_view", function=lambda x: aten._unsafe_view.default(x, (-1,)), inputs=(T("nc"),), split="nc"),
    Sample(
        name="aten.reshape_alias",
        function=lambda x: aten._reshape_alias.default(x, (x.shape[0] * x.shape[1],), (1,)),
        inputs=(T("nc"),),
        split="nc",
    ),
    Sample(
        name="aten.embedding_dense_backward",
        function=lambda g, i: aten.embedding_dense_backward.default(g, i, 7, -1, False),
        inputs=(T("bsc"), T("bs", "index", 7)),
        split="bs",
        refused="c",
        grads=False,
    ),
]

SAMPLES = [*POINTWISE, *PRODUCTS, *VIEWS, *FACTORIES, *OPERATORS]
