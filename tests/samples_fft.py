"""Samples of Fourier transforms and complex numbers."""

import torch

from tests.samples import Sample, T

aten = torch.ops.aten
fft = torch.fft
X = (T("nck"),)


def real(z):
    return torch.view_as_real(z.resolve_conj()) if z.is_complex() else z


def reals(function):
    return lambda *xs: tuple(real(z) for z in function(*xs))


def both(name, function):
    """The transform along each of two split dims and one that is whole."""
    return Sample(name=name, function=reals(lambda x: [function(x, d) for d in range(3)]), inputs=X, split="nc")


def several(name, function):
    return Sample(name=name, function=reals(function), inputs=X, split="nc")


def lowest_modes(x, w):
    """What a Fourier neural operator does: the lowest modes of a spectrum times weights, in a spectrum of zeros."""
    spectrum = fft.rfft2(x, dim=(1, 2))
    modes = min(2, spectrum.shape[2]), min(3, spectrum.shape[1])
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    low = spectrum[:, : modes[1], : modes[0]]
    out[:, : modes[1], : modes[0]] = torch.einsum("imn,io->omn", low, torch.complex(w, w * 2))
    return fft.irfft2(out, s=x.shape[1:], dim=(1, 2)) + x


SAMPLES = [
    both("fft", lambda x, d: fft.fft(x, dim=d)),
    both("fft of another length", lambda x, d: fft.fft(x, 5, d, "ortho")),
    both("ifft", lambda x, d: fft.ifft(fft.fft(x, dim=d), dim=d)),
    both("rfft and irfft", lambda x, d: fft.irfft(fft.rfft(x, dim=d) * 2, n=x.shape[d], dim=d)),
    both("hfft and ihfft", lambda x, d: fft.hfft(x, dim=d) if x.shape[d] > 1 else x),
    both("ihfft", lambda x, d: fft.ihfft(x, dim=d)),
    several("fftn", lambda x: [fft.fftn(x), fft.ifftn(x, dim=(0, 1)), fft.rfftn(x, dim=(1, 2), norm="forward")]),
    several("irfftn", lambda x: [fft.irfftn(fft.rfftn(x), s=x.shape)]),
    several("hfftn and ihfftn", lambda x: [fft.hfftn(x, s=(4, 4), dim=(0, 1)), fft.ihfftn(x, dim=(0, 1))]),
    several("fft2", lambda x: [fft.fft2(x), fft.ifft2(fft.fft2(x, dim=(0, 1)), dim=(0, 1)), fft.rfft2(x, dim=(0, 1))]),
    several("irfft2", lambda x: [fft.irfft2(fft.rfft2(x, dim=(0, 1)), s=x.shape[:2], dim=(0, 1))]),
    several("hfft2 and ihfft2", lambda x: [fft.hfft2(x, s=(4, 4), dim=(0, 1)), fft.ihfft2(x, dim=(1, 2))]),
    several("fftshift", lambda x: [fft.fftshift(x), fft.ifftshift(x, dim=(0,)), fft.ifftshift(fft.fftshift(x, 1), 1)]),
    Sample(
        name="parts of a spectrum",
        function=lambda x: (
            *(f(fft.fft(x, dim=0)) for f in (torch.real, torch.imag, torch.abs, lambda z: z.real, lambda z: z.imag)),
            fft.fft(x, dim=1).real + x,
        ),
        inputs=X,
        split="nc",
    ),
    Sample(
        name="angle of a spectrum",
        function=lambda x: (torch.angle(fft.fft(x, dim=0)).cos(), fft.fft(x, dim=0).angle().cos()),
        inputs=X,
        split="nc",
        grads=False,
    ),
    Sample(name="lowest modes of a spectrum", function=lowest_modes, inputs=(T("inc"), T("ii")), split="nc", plain=(1,)),
    Sample(
        name="complex numbers",
        function=reals(
            lambda x, y: [
                torch.complex(x, y).conj() * torch.polar(x.abs(), y),
                torch.complex(x, y).conj().sum(0),
                torch.complex(x, y).mH @ torch.complex(x, y),
                torch.complex(x, y).conj().imag,
                torch.complex(x, y).cumsum(0),
                torch.complex(x, y).conj().flip(0),
            ]
        ),
        inputs=(T("nc"), T("nc")),
        split="nc",
    ),
    Sample(
        name="aten transforms",
        function=reals(
            lambda x: [
                aten._fft_r2c.default(x, [0], 0, True),
                aten._fft_c2c.default(torch.complex(x, x), [1], 0, True),
                aten._fft_c2r.default(torch.complex(x, x * 0), [2], 0, 4),
                aten._neg_view.default(x),
            ]
        ),
        inputs=X,
        split="nc",
        grads=False,
    ),
]
