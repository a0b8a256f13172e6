"""Samples of pooling, padding, interpolation, sliding blocks and sampling. Their own tests go through many more settings."""

from functools import partial

import torch
import torch.nn.functional as F

from tests.samples import Sample, T

DIMS = {1: "bch", 2: "bchw", 3: "bchwz"}
SIZES = {"b": 1, "c": 2, "w": 6, "z": 5}


def windowed(n, name, function, split="h", **options):
    return Sample(name=name, function=function, inputs=(T(DIMS[n]),), split=split, sizes=SIZES, **options)


POOLING = [
    *(
        windowed(n, f.__name__, partial(f, kernel_size=3, stride=2, padding=1, ceil_mode=True, count_include_pad=False))
        for n, f in ((1, F.avg_pool1d), (2, F.avg_pool2d), (3, F.avg_pool3d))
    ),
    *(
        windowed(n, f.__name__, partial(f, kernel_size=3, stride=2, padding=1), vary="")
        for n, f in ((1, F.max_pool1d), (2, F.max_pool2d), (3, F.max_pool3d))
    ),
    *(
        windowed(n, f"{f.__name__} dilated", partial(f, kernel_size=2, dilation=2, return_indices=True), vary="")
        for n, f in ((1, F.max_pool1d), (2, F.max_pool2d), (3, F.max_pool3d))
    ),
    windowed(2, "avg_pool2d with a divisor", partial(F.avg_pool2d, kernel_size=(4, 2), stride=(3, 2), divisor_override=5), split="hwbc"),
    windowed(2, "lp_pool2d", partial(F.lp_pool2d, norm_type=3, kernel_size=2, stride=1)),
    *(
        windowed(n, f"{f.__name__} to {size}", partial(f, output_size=size))
        for n, f in ((1, F.adaptive_avg_pool1d), (2, F.adaptive_avg_pool2d), (3, F.adaptive_avg_pool3d))
        for size in (1, 5)
    ),
    *(
        windowed(n, f"{f.__name__} to {size}", partial(f, output_size=size))
        for n, f in ((1, F.adaptive_max_pool1d), (2, F.adaptive_max_pool2d), (3, F.adaptive_max_pool3d))
        for size in (1, 5)
    ),
    *(
        windowed(n, f"{f.__name__} with indices", partial(f, output_size=3, return_indices=True))
        for n, f in ((1, F.adaptive_max_pool1d), (2, F.adaptive_max_pool2d), (3, F.adaptive_max_pool3d))
    ),
    *(
        Sample(
            name=f"{f.__name__}{' with indices' if indices else ''}",
            function=lambda x, u, f=f, n=n, indices=indices: f(x, 2, (3,) * n, return_indices=indices, _random_samples=u.detach().abs()),
            inputs=(T(DIMS[n]), T(f"bc{n}", "unit")),
            split="h",
            plain=(1,),
            sizes={**SIZES, "2": 2, "3": 3},
        )
        for n, f in ((2, F.fractional_max_pool2d), (3, F.fractional_max_pool3d))
        for indices in (False, True)
    ),
]


def unpooled(pool, unpool):
    def there_and_back(x):
        values, places = pool(x, 3, stride=2, return_indices=True)
        return unpool(values, places, 3, stride=2, output_size=x.shape[2:])

    return there_and_back


BLOCKS = [
    *(
        windowed(n, unpool.__name__, unpooled(pool, unpool), vary="")
        for n, pool, unpool in (
            (1, F.max_pool1d, F.max_unpool1d),
            (2, F.max_pool2d, F.max_unpool2d),
            (3, F.max_pool3d, F.max_unpool3d),
        )
    ),
    windowed(2, "unfold", partial(F.unfold, kernel_size=3, padding=1, stride=2), split="hwc"),
    windowed(2, "unfold then fold", lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1), split="hw"),
    windowed(2, "windows of a dim", lambda x: x.unfold(2, 4, 3), split="hw", vary=""),
    windowed(2, "windows of a whole dim", lambda x: x.unfold(3, 3, 1).sum(-1) ** 2, split="h"),
    windowed(2, "pixel_shuffle", lambda x: F.pixel_shuffle(torch.cat((x, x), 1), 2), split="hc", vary=""),
    windowed(2, "pixel_unshuffle", partial(F.pixel_unshuffle, downscale_factor=2), split="hwc", vary=""),
    windowed(2, "channel_shuffle", partial(F.channel_shuffle, groups=2), split="hc", vary="h"),
    windowed(1, "channel_shuffle by its general name", partial(torch.channel_shuffle, groups=2), split="h"),
]

PADDING = [
    *(
        windowed(2, f"pad {mode}", partial(F.pad, pad=(1, 2, 3, 2), mode=mode), split="hw", vary="")
        for mode in ("constant", "reflect", "replicate", "circular")
    ),
    windowed(2, "crop and pad", partial(F.pad, pad=(0, 0, 5, -3, 1, 0), value=2.0), vary=""),
    windowed(1, "constant_pad_nd", lambda x: torch.constant_pad_nd(x, (2, 1), 0.5)),
]

SAMPLING = [
    *(
        windowed(2, f"interpolate {mode}", partial(F.interpolate, scale_factor=factor, mode=mode), split="hw" if factor == 2 else "h")
        for mode, factor in (("nearest", 2), ("nearest-exact", 1.5), ("bilinear", 2), ("bicubic", 0.7))
    ),
    windowed(2, "interpolate area", partial(F.interpolate, scale_factor=0.5, mode="area"), vary=""),  # torch itself has no backward to no rows
    windowed(2, "interpolate with antialias", partial(F.interpolate, size=(5, 4), mode="bicubic", antialias=True)),
    windowed(1, "interpolate between corners", partial(F.interpolate, size=17, mode="linear", align_corners=True)),
    Sample(name="grid_sample", function=partial(F.grid_sample, align_corners=False), inputs=(T("bchw"), T("bpq2", "unit")), split="hpc",
           sizes={**SIZES, "p": 7, "2": 2}),
    Sample(name="affine_grid", function=lambda t, x: F.grid_sample(x, F.affine_grid(t, x.shape, False), align_corners=False),
           inputs=(T("b23"), T("bchw")), split="hb", sizes={**SIZES, "b": 4, "2": 2, "3": 3}, vary="h"),
]  # fmt: skip

SAMPLES = [*POOLING, *BLOCKS, *PADDING, *SAMPLING]
