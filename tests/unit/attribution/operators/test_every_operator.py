"""Laws that hold for every operator: it is linear, fixed by its seed, and its adjoint is its transpose."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import ALL
from torch import Tensor

from attribution.errors import SketchMismatchError
from attribution.sketch.operators import SRHT, Chunked, Operator, RolledFold, operator
from attribution.sketch.operators.implicit import (
    explicit_gradient,
    explicit_hvp,
    flat_loss,
    implicit_gradient,
    implicit_hvp,
)
from auditlog.errors import UsageError

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64, a few hundred additions


@pytest.fixture(params=ALL)
def build(request: pytest.FixtureRequest) -> Callable[[str], Operator]:
    return ALL[request.param]


@pytest.fixture
def S(build: Callable[[str], Operator]) -> Operator:
    return build("0")


def vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_it_is_linear(S: Operator) -> None:
    x, y = vectors(2, S.N)
    torch.testing.assert_close(S @ (2.5 * x - 3 * y), 2.5 * (S @ x) - 3 * (S @ y), **EXACT)


def test_its_adjoint_is_its_transpose(S: Operator) -> None:
    """Both as matrices, entry by entry, padding included."""
    matrix = S @ torch.eye(S.N, dtype=torch.float64)  # (N, D): row i is S e_i
    transpose = S.adjoint(torch.eye(S.D, dtype=torch.float64))  # (D, N)
    assert matrix.shape == (S.N, S.D)
    torch.testing.assert_close(matrix, transpose.T, **EXACT)
    assert matrix.norm() > 1, "a map of zeros is its own transpose"


def test_rows_are_sketched_and_lifted_as_if_alone(S: Operator) -> None:
    x, u = vectors(2, 3, S.N), vectors(2, 3, S.D)
    torch.testing.assert_close((S @ x)[1, 2], S @ x[1, 2], **EXACT)
    torch.testing.assert_close(S.adjoint(u)[1, 2], S.adjoint(u[1, 2]), **EXACT)


def test_both_precisions_agree_and_half_precision_is_computed_in_float32(S: Operator) -> None:
    x = vectors(3, S.N)
    torch.testing.assert_close((S @ x.float()).double(), S @ x, rtol=1e-4, atol=1e-4)
    assert torch.equal(S @ x.bfloat16(), S @ x.bfloat16().float())
    assert S.adjoint(vectors(S.D)).dtype == torch.float64


def test_the_seed_fixes_it_and_another_seed_differs(build: Callable[[str], Operator]) -> None:
    x = vectors(build("0").N)
    assert torch.equal(build("a") @ x, build("a") @ x)
    assert build("a").digest == build("a").digest
    assert not torch.allclose(build("a") @ x, build("b") @ x)
    assert build("a").digest != build("b").digest


@pytest.fixture(scope="module")
def other_process() -> dict[str, tuple[str, list[float]]]:
    code = (
        "import json, torch; from operator_cases import ALL; out = {}\n"
        "for name, build in ALL.items():\n"
        "    S = build('0'); x = torch.linspace(-1, 1, S.N, dtype=torch.float64)\n"
        "    out[name] = S.digest, (S @ x).tolist()\n"
        "print(json.dumps(out))"
    )
    path = {"PYTHONPATH": "tests:.", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=path)
    result: dict[str, tuple[str, list[float]]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", ALL)
def test_another_process_makes_the_same_map(name: str, other_process: dict[str, tuple[str, list[float]]]) -> None:
    S = ALL[name]("0")
    digest, sketch = other_process[name]
    assert S.digest == digest
    expected = S @ torch.linspace(-1, 1, S.N, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(sketch, dtype=torch.float64), expected, **EXACT)


# Stored sketches are only readable while these stay what they are. Maps with random rotations are left out: their
# last bits are those of the machine's LAPACK.
DIGESTS = {
    "gaussian": "8596c698a5a76f54",
    "rademacher": "8388693eb01ffdde",
    "count_sketch": "587b6c87c5bdfa94",
    "sjlt": "2e48f8f7ed3c50b2",
    "rolled_fold": "681cfae542fe9374",
    "plain_fold": "864c6bc9c339e319",
    "srht": "94b53c39d88a4b02",
    "fjl": "3e89c6375f4a2b8c",
    "ffd": "fb4d4291178460c2",
    "affd": "ba46e8e0bfe54593",
    "affd_fast": "ad24fd9e099b2219",
    "afjl": "6e0616d42a138619",
    "afjl_fft": "e171dae6ce05d702",
    "two_sided": "ab5bd97ef8aada85",
    "two_sided, one side left": "0c378752bbb274b2",
    "concatenated": "62b7565eba53c512",
    "summed": "3ca5c1b8b949f4ec",
    "chunked": "1a21afc6d0674bde",
    "composed": "8f18be5e4069c59f",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_tables_never_change(name: str) -> None:
    assert ALL[name]("0").digest[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", ["srht", "fjl", "ffd", "affd", "affd_fast", "afjl", "afjl_fft", "afjl_q", "qk"])
def test_zeros_at_the_end_change_nothing(name: str) -> None:
    """A vector and the same one filled up to the padded length have the same sketch, and the seed still fixes it."""
    shorter, longer = operator(name, 405, 16, "0"), operator(name, 512 if name != "ffd" else 416, 16, "0")
    assert shorter.padded == longer.padded == longer.N
    x = vectors(405)
    filled = torch.cat([x, torch.zeros(longer.N - 405, dtype=torch.float64)])
    torch.testing.assert_close(shorter @ x, longer @ filled, **EXACT)


def test_explicit_and_implicit_sketches_are_one(S: Operator) -> None:
    """Gradient and Hessian-vector product of a loss that is not quadratic."""
    theta, weight = vectors(S.N) / 10, vectors(7, S.N, seed=1) / 10

    def loss(t: Tensor) -> Tensor:
        return (torch.tanh(weight @ t) ** 3).sum() + (t**4).sum()

    v = vectors(S.D, seed=2)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(implicit_gradient(loss, theta, S), explicit_gradient(loss, theta, S), **close)
    torch.testing.assert_close(implicit_hvp(loss, theta, S, v), explicit_hvp(loss, theta, S, v), **close)
    by_hand = 3 * torch.tanh(weight @ theta) ** 2 * (1 - torch.tanh(weight @ theta) ** 2) @ weight + 4 * theta**3
    torch.testing.assert_close(explicit_gradient(loss, theta, S), S @ by_hand, **close)


def test_a_models_loss_as_a_function_of_one_vector() -> None:
    """Sketching a model implicitly gives the sketch of what backward leaves in ``grad``, frozen weights left out."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()
    model[0].bias.requires_grad = False
    x = vectors(6, 5)
    loss, theta = flat_loss(model, lambda m: m(x).square().sum())
    S = SRHT(len(theta), 16)
    model(x).square().sum().backward()
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(implicit_gradient(loss, theta, S), S @ flat, **EXACT)
    assert loss(theta).item() == pytest.approx(model(x).square().sum().item())


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 405), max_size=6), chunk=st.integers(20, 405))
def test_a_stream_of_pieces_of_any_length_is_the_whole(cuts: list[int], chunk: int) -> None:
    S = Chunked.of(RolledFold, 405, 8, "0", chunk=chunk)
    x = vectors(2, 405)
    bounds = [0, *sorted(cuts), 405]
    streamed = S.sketch(x[:, a:b] for a, b in pairwise(bounds))
    by_hand = sum(part @ x[:, c * chunk : (c + 1) * chunk] for c, part in enumerate(S.parts))
    torch.testing.assert_close(streamed, by_hand, **EXACT)
    torch.testing.assert_close(S @ x, streamed, **EXACT)


def test_chunks_are_independent() -> None:
    S = Chunked.of(SRHT, 200, 8, "0", chunk=100)
    x = vectors(100)
    zeros = torch.zeros(100, dtype=torch.float64)
    assert not torch.allclose(S @ torch.cat([x, zeros]), S @ torch.cat([zeros, x]))


@pytest.mark.parametrize(("length", "word"), [(404, "fewer"), (406, "more")])
def test_a_stream_of_another_length_is_refused(length: int, word: str) -> None:
    S = Chunked.of(SRHT, 405, 8, "0", chunk=100)
    with pytest.raises(SketchMismatchError, match=word):
        S.sketch([torch.zeros(1, length)])


def test_vectors_of_another_length_are_refused(S: Operator) -> None:
    with pytest.raises(SketchMismatchError, match=f"length {S.N}, this tensor has shape"):
        S @ torch.zeros(2, S.N + 1)
    with pytest.raises(SketchMismatchError, match="adjoint"):
        S.adjoint(torch.zeros(()))


def test_impossible_maps_are_refused() -> None:
    with pytest.raises(UsageError, match="no sketch operator 'fast'"):
        operator("fast", 10, 2)
    with pytest.raises(UsageError, match="must be positive"):
        operator("gaussian", 10, 0)
    for name in ("srht", "affd", "affd_fast", "afjl", "afjl_fft", "afjl_q", "qk", "ffd"):
        with pytest.raises(UsageError, match="must be a power of two"):
            operator(name, 100, 12)
    with pytest.raises(UsageError, match="not a multiple of nonzeros=4"):
        operator("sjlt", 100, 6)
