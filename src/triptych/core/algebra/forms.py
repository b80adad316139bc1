"""A bilinear form stored as a product of two thin factors.

    A = L Rᵀ,   A(x, y) = x A yᵀ        L [d_left, r], R [d_right, r], x and y rows

A head has two forms: W_QK = W_Q W_Kᵀ (left W_Q, right W_K) and W_OV = W_V W_O (left W_V, right W_Oᵀ).
Decompositions start from the thin QR of each factor, L = Q_l R_l and R = Q_r R_r, and the small core
C = R_l R_rᵀ: A = Q_l C Q_rᵀ, so A and C share their non-zero singular values. The cost is O(d r²) instead
of O(d³). Only `dense()` and `numpy()` build A.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Complex, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.algebra.spectrum import Spectrum, or_one

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ThinSVD(NamedTuple):
    """Thin singular value decomposition, A = U diag(S) Vh with k = min(r, d_left, d_right)."""

    # The entry of largest magnitude of each column is positive.
    U: Float[Tensor, "*batch d_left k"]
    S: Float[Tensor, "*batch k"]  # descending
    Vh: Float[Tensor, "*batch k d_right"]


class _Reduced(NamedTuple):
    """Reduction A = Q_left core Q_rightᵀ to a small core; Q_left and Q_right have orthonormal columns."""

    Q_left: Tensor
    core: Tensor
    Q_right: Tensor


@final
@dataclass(frozen=True, eq=False, repr=False)
class BilinearForm:
    """A bilinear form A = left rightᵀ, or a batch of forms (heads, layers).

    The inner width r is arbitrary: thin (a factored head), d (a head with one matrix W: left = W, right =
    identity), or larger. Every method computes the whole batch in one call. Results depend on A only, not on
    its factorisation, apart from the factors, the widths and the number of singular values listed.

    Products (`dense`, `apply`, `scores`, `@`) keep the factors' dtype. Measures and decompositions
    of float16 and bfloat16 factors are computed and returned in float32; the caller rounds back with `to`.
    They raise a ValueError for factors with NaN or infinity. Gradients flow through measures and
    decompositions if the factors have full column rank and, where singular vectors are returned, the singular
    values are distinct.

    Attributes:
        left: left factor, `[*batch, d_left, r]`.
        right: right factor, `[*batch, d_right, r]`.

    Raises:
        ValueError: the factors do not fit together (r, batch, dtype, device), or their dtype is not one of
            float16, bfloat16, float32 and float64.
    """

    left: Float[Tensor, "*batch d_left r"]
    right: Float[Tensor, "*batch d_right r"]

    def __post_init__(self) -> None:
        left = self.left
        right = self.right
        if left.ndim < 2 or right.ndim < 2:
            raise ValueError(
                f"factors have {left.ndim} and {right.ndim} dimensions: each needs at least 2"
            )
        if left.shape[-1] != right.shape[-1]:
            raise ValueError(
                f"left has width {left.shape[-1]} and right {right.shape[-1]}: they must be equal"
            )
        if min(*left.shape[-2:], right.shape[-2]) < 1:
            raise ValueError(
                f"factors are {_times(left.shape[-2:])} and {_times(right.shape[-2:])}: "
                "no width may be smaller than 1"
            )
        if left.dtype not in _DTYPES:
            raise ValueError(
                f"factors are {left.dtype}: they must be float16, bfloat16, float32 or float64"
            )
        _require_one_batch("left", left, "right", right)

    def __repr__(self) -> str:
        shape = _times(self.shape)
        return f"BilinearForm({shape}, width {self.width}, {self.left.dtype}, {self.left.device})"

    def _repr_html_(self) -> str:
        from triptych.core.algebra.pictures import form_in_notebook

        return form_in_notebook(self.left, self.right)

    @property
    def batch(self) -> torch.Size:
        """Leading dimensions of the factors."""
        return self.left.shape[:-2]

    @property
    def shape(self) -> torch.Size:
        """Shape of A, `[*batch, d_left, d_right]`."""
        return torch.Size((*self.batch, self.d_left, self.d_right))

    @property
    def d_left(self) -> int:
        """Number of rows of A: the width of x in x A yᵀ."""
        return self.left.shape[-2]

    @property
    def d_right(self) -> int:
        """Number of columns of A: the width of y in x A yᵀ."""
        return self.right.shape[-2]

    @property
    def width(self) -> int:
        """Inner width r of the factors, an upper bound of the rank of A."""
        return self.left.shape[-1]

    @property
    def max_rank(self) -> int:
        """Number of singular values, k = min(r, d_left, d_right)."""
        return min(self.width, self.d_left, self.d_right)

    def to(self, dtype: torch.dtype) -> "BilinearForm":
        """Cast both factors."""
        return BilinearForm(self.left.to(dtype), self.right.to(dtype))

    # Products.

    def dense(self) -> Float[Tensor, "*batch d_left d_right"]:
        """Build A, `[*batch, d_left, d_right]`, for teaching and tests."""
        return self.left @ self.right.mT

    def numpy(self) -> NDArray[Any]:
        """Build A as an array."""
        return at_least_float32(self.dense()).detach().cpu().numpy()

    def apply(
        self, x: Float[Tensor, "*x_batch n d_x"]
    ) -> Float[Tensor, "*out_batch n d_right"]:
        """Compute X A with the factors.

        Args:
            x: rows, `[*batch, n, d_left]`; leading dimensions broadcast with the form's batch.

        Returns:
            `[*batch, n, d_right]`.

        Raises:
            ValueError: x does not fit the form; the message gives both sizes.
        """
        self._require_input("x", x, self.d_left)
        return (x @ self.left) @ self.right.mT

    def scores(
        self, x: Float[Tensor, "*x_batch n d_x"], y: Float[Tensor, "*y_batch m d_y"]
    ) -> Float[Tensor, "*out_batch n m"]:
        """Compute X A Yᵀ, the form's value at every pair of rows, without division by √d_k.

        Args:
            x: rows, `[*batch, n, d_left]`; leading dimensions broadcast with the form's batch.
            y: rows, `[*batch, m, d_right]`; leading dimensions broadcast with the form's batch.

        Returns:
            `[*batch, n, m]`.

        Raises:
            ValueError: x or y does not fit the form; the message gives both sizes.
        """
        self._require_input("x", x, self.d_left)
        self._require_input("y", y, self.d_right)
        return (x @ self.left) @ (y @ self.right).mT

    def transpose(self) -> "BilinearForm":
        """Return Aᵀ: swap the factors."""
        return BilinearForm(self.right, self.left)

    def __matmul__(self, other: "BilinearForm") -> "BilinearForm":
        """Multiply two forms of one batch, A B; the result has the smaller of the two widths."""
        if self.d_right != other.d_left:
            raise ValueError(
                f"a form of {self.d_left} × {self.d_right} cannot be followed by one of "
                f"{other.d_left} × {other.d_right}: {self.d_right} and {other.d_left} must be equal"
            )
        _require_one_batch("the first form", self.left, "the second", other.left)
        middle = self.right.mT @ other.left
        if self.width <= other.width:
            return BilinearForm(self.left, other.right @ middle.mT)
        return BilinearForm(self.left @ middle, other.right)

    def __sub__(self, other: "BilinearForm") -> "BilinearForm":
        """Subtract a form, A − B; factors are concatenated, so the widths add up."""
        if (self.d_left, self.d_right) != (other.d_left, other.d_right):
            raise ValueError(
                f"forms of {self.d_left} × {self.d_right} and {other.d_left} × {other.d_right} "
                "have no difference: they must be of one shape"
            )
        _require_one_batch("the first form", self.left, "the second", other.left)
        return BilinearForm(
            torch.cat((self.left, other.left), dim=-1),
            torch.cat((self.right, -other.right), dim=-1),
        )

    def difference_norm(self, other: "BilinearForm") -> Float[Tensor, "*batch"]:
        """Compute ‖A − B‖_F, accurate to rounding of the factors (ε ‖left‖ ‖right‖) even if B is close to A.

        The norm is that of `A − B`; ‖A‖² + ‖B‖² − 2 tr(AᵀB) would lose half the digits.

        Args:
            other: the form B, with the shape and batch of A.

        Raises:
            ValueError: the forms do not fit, or have entries with NaN or infinity.
        """
        return (self - other).norm()

    # Spectrum.

    def svd(self) -> ThinSVD:
        """Compute the thin singular value decomposition of A, with fixed signs (see `ThinSVD`)."""
        Q_left, core, Q_right = self._reduce()
        U, S, Vh = torch.linalg.svd(core, full_matrices=False)
        U = Q_left @ U
        Vh = Vh @ Q_right.mT
        largest = U.gather(-2, U.abs().argmax(dim=-2, keepdim=True))
        signs = torch.where(largest < 0, -1.0, 1.0).to(U.dtype)
        return ThinSVD(U * signs, S, signs.mT * Vh)

    def singular_values(self) -> Float[Tensor, "*batch k"]:
        """Compute k = min(r, d_left, d_right) singular values of A, descending; further values are 0."""
        S: Tensor = torch.linalg.svdvals(self._core())
        return S

    def spectrum(self) -> Spectrum:
        """Return the singular values as a `Spectrum`, with ranks and norms."""
        return Spectrum(self.singular_values())

    def eigenvalues(self) -> Complex[Tensor, "*batch k"]:
        """Compute k = min(r, d) eigenvalues of a square A by descending magnitude; further values are 0."""
        values: Tensor = torch.linalg.eigvals(self._squeeze("eigenvalues"))
        return values.gather(
            -1, values.abs().argsort(dim=-1, descending=True, stable=True)
        )

    def rank(self, tolerance: float | None = None) -> Int[Tensor, "*batch"]:
        """Count the singular values above tolerance · σ₁; 0 for the zero form.

        Args:
            tolerance: relative threshold, at least 0. Default: max(d_left, d_right) times the dtype's
                epsilon, as in `torch.linalg.matrix_rank`.

        Raises:
            ValueError: the tolerance is below 0, or the factors are not finite.
        """
        if tolerance is not None and not tolerance >= 0:
            raise ValueError(f"tolerance is {tolerance}: it must be at least 0")
        return self._mask_above(self.singular_values(), tolerance).sum(dim=-1)

    def norm(self) -> Float[Tensor, "*batch"]:
        """Compute the Frobenius norm, √Σ σ_i²."""
        core = self._core()
        largest = core.abs().amax(dim=(-2, -1))
        # Squares of very small entries would underflow, and squares of very large entries overflow.
        norm: Tensor = torch.linalg.matrix_norm(core / or_one(largest)[..., None, None])
        return norm * largest

    def spectral_norm(self) -> Float[Tensor, "*batch"]:
        """Compute σ₁, the largest factor by which A stretches a row."""
        return self.singular_values()[..., 0]

    def effective_rank(self) -> Float[Tensor, "*batch"]:
        """Compute the exponential of the entropy of σ/Σσ: 1 to k, and 0 for the zero form.

        Source: Roy & Vetterli 2007, "The effective rank", EUSIPCO.
        """
        return self.spectrum().effective_rank

    def stable_rank(self) -> Float[Tensor, "*batch"]:
        """Compute ‖A‖_F²/σ₁²: 1 to k, and 0 for the zero form."""
        return self.spectrum().stable_rank

    def participation_ratio(self) -> Float[Tensor, "*batch"]:
        """Compute (Σσ²)²/Σσ⁴: 1 to k, and 0 for the zero form."""
        return self.spectrum().participation_ratio

    def energy(self, rank: int) -> Float[Tensor, "*batch"]:
        """Compute the share of Σσ² in the nearest form of a rank; 1 for the zero form.

        Args:
            rank: rank of the nearest form, 1 ≤ rank ≤ k = min(r, d_left, d_right).

        Raises:
            ValueError: the rank is out of range; the message gives the range.
        """
        self._require_rank(rank)
        return self.spectrum().kept[..., rank - 1]

    # Square forms.

    def trace(self) -> Float[Tensor, "*batch"]:
        """Sum the diagonal of a square A."""
        self._require_square("trace")
        left, right = self._working_factors()
        return (left * right).sum(dim=(-2, -1))

    def symmetry_score(self) -> Float[Tensor, "*batch"]:
        """Compute tr(A²)/‖A‖²: 1 if A is symmetric, −1 if antisymmetric, about 0 if random, 0 for A = 0."""
        M = self._squeeze("symmetry score")
        # tr(M²) = tr(A²), but ‖M‖ differs from ‖A‖ because Q_left and Q_right differ.
        norm = or_one(self.norm())[..., None, None]
        M = M / norm
        return (M * M.mT).sum(dim=(-2, -1)).clamp(-1.0, 1.0)

    def symmetric_share(self) -> Float[Tensor, "*batch"]:
        """Compute ‖½(A + Aᵀ)‖²/‖A‖² = ½(1 + symmetry score): 0 to 1, and ½ if A is zero.

        Raises:
            ValueError: A is not square; the message gives both widths.
        """
        return (1 + self.symmetry_score()) / 2

    # Other factorisations.

    def truncate(self, rank: int) -> "BilinearForm":
        """Compute the nearest form of a rank in Frobenius norm, A ≈ (U_r S_r^½)(V_r S_r^½)ᵀ.

        Args:
            rank: rank of the nearest form, 1 ≤ rank ≤ k = min(r, d_left, d_right).

        Returns:
            A form of width `rank`, factored as by `gauge_fix`. Its error is √(Σ_{i>rank} σ_i²).

        Raises:
            ValueError: the rank is out of range; the message gives the range.

        Source: Eckart & Young 1936, doi 10.1007/BF02288367.
        """
        self._require_rank(rank)
        U, S, Vh = self.svd()
        # A singular value of rounding size, about ε σ₁, would appear as √ε in both factors.
        S = torch.where(self._mask_above(S), S, 0.0)[..., None, :rank].sqrt()
        return BilinearForm(U[..., :rank] * S, Vh[..., :rank, :].mT * S)

    def gauge_fix(self) -> "BilinearForm":
        """Return the canonical factorisation of A, equal for all gauges: U S^½ and V S^½, of width k.

        Singular values descend, and the entry of largest magnitude of each left column is positive.
        The factorisation is unique if the non-zero singular values are distinct. Columns of zero singular
        values are zero.
        """
        return self.truncate(self.max_rank)

    # Inside.

    def _working_factors(self) -> tuple[Tensor, Tensor]:
        # torch has no QR or SVD below float32.
        _require_finite_factors(left=self.left, right=self.right)
        dtype = torch.promote_types(self.left.dtype, torch.float32)
        return self.left.to(dtype), self.right.to(dtype)

    def _reduce(self) -> _Reduced:
        left, right = self._working_factors()
        Q_left, R_left = torch.linalg.qr(left)
        Q_right, R_right = torch.linalg.qr(right)
        return _Reduced(Q_left, _finite_product(R_left, R_right.mT), Q_right)

    def _core(self) -> Tensor:
        """Compute the core of `_reduce`, up to signs, at half the cost. It has the singular values of A."""
        factors = self._working_factors()
        # torch computes gradients of R only together with Q.
        learns = torch.is_grad_enabled() and any(
            factor.requires_grad for factor in factors
        )
        left, right = (
            torch.linalg.qr(factor, mode="reduced" if learns else "r").R
            for factor in factors
        )
        return _finite_product(left, right.mT)

    def _squeeze(self, what: str) -> Tensor:
        """Compute M = C Q_rightᵀ Q_left with the non-zero eigenvalues of a square A, so tr(Mⁿ) = tr(Aⁿ)."""
        self._require_square(what)
        Q_left, core, Q_right = self._reduce()
        return core @ (Q_right.mT @ Q_left)

    def _mask_above(self, S: Tensor, tolerance: float | None = None) -> Tensor:
        if tolerance is None:
            tolerance = max(self.d_left, self.d_right) * torch.finfo(S.dtype).eps
        return S.gt(S[..., :1] * tolerance)

    def _require_rank(self, rank: int) -> None:
        if not 1 <= rank <= self.max_rank:
            raise ValueError(
                f"rank is {rank}: a form of {self.d_left} × {self.d_right} and width {self.width} "
                f"takes 1 to {self.max_rank}"
            )

    def _require_square(self, what: str) -> None:
        if self.d_left != self.d_right:
            raise ValueError(
                f"a form of {self.d_left} × {self.d_right} has no {what}: it is not square"
            )

    def _require_input(self, name: str, x: Tensor, width: int) -> None:
        if x.ndim < 2 or x.shape[-1] != width:
            raise ValueError(
                f"{name} is {_times(x.shape)}: the form takes rows of width {width}"
            )
        ours = reversed(self.batch)
        theirs = reversed(x.shape[:-2])
        if any(a != b and 1 not in (a, b) for a, b in zip(ours, theirs, strict=False)):
            raise ValueError(
                f"{name} has batch {list(x.shape[:-2])} and the form {list(self.batch)}: they differ"
            )
        _require_one_dtype_and_device(name, x, "the form", self.left)


def are_finite(numbers: Tensor) -> bool:
    """Return True if no value is NaN or infinite. Read each value once, in memory order."""
    if not numbers.numel():
        return True
    by_stride = sorted(range(numbers.ndim), key=numbers.stride, reverse=True)
    least, most = numbers.detach().permute(by_stride).aminmax()
    return bool(least.isfinite() and most.isfinite())


def at_least_float32(numbers: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is float64."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


def _times(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _require_one_batch(
    name: str, first: Tensor, other_name: str, second: Tensor
) -> None:
    if first.shape[:-2] != second.shape[:-2]:
        raise ValueError(
            f"{name} has batch {list(first.shape[:-2])} and {other_name} {list(second.shape[:-2])}: "
            "they must agree"
        )
    _require_one_dtype_and_device(name, first, other_name, second)


def _require_one_dtype_and_device(
    name: str, first: Tensor, other_name: str, second: Tensor
) -> None:
    if first.dtype != second.dtype:
        raise ValueError(
            f"{name} is {first.dtype} and {other_name} {second.dtype}: cast one of them"
        )
    if first.device != second.device:
        raise ValueError(
            f"{name} is on {first.device} and {other_name} on {second.device}: move one of them"
        )


def _finite_product(one: Tensor, two: Tensor) -> Tensor:
    product = one @ two
    if not bool(product.isfinite().all()):
        raise ValueError(
            f"the product of the factors overflows {product.dtype}: cast the form to float64"
        )
    return product


def _require_finite_factors(**tensors: Tensor) -> None:
    if not all(are_finite(tensor) for tensor in tensors.values()):
        counts = {
            name: int((~tensor.isfinite()).sum()) for name, tensor in tensors.items()
        }
        where = " and ".join(
            f"{count} of {name}" for name, count in counts.items() if count
        )
        raise ValueError(
            f"not finite (NaN or infinite) are {where}: entries must be finite"
        )
