"""Who claims which parameter: found by tracing the loss, and checked, before anything is computed.

A parameter nobody claims would not be clipped. One claimed twice by the same op would have two records added up as if they
were one, or the second would overwrite the first: its norm would be wrong with no symptom. Both are errors when the step is built.
"""

from typing import Any

import jax
from jax.extend import core

from dpx.clipping.probes import Claim, Session, shapes_of, wrap
from dpx.declaration import Refused

Claims = dict[tuple[str, str], Claim]

# Ops of which a pair on one table is exact together, because their cross-term is routed from one to the other.
TIED = ({"lookup", "decode"}, {"lookup", "token_loss"})


def discover(losses_fn: Any, params: Any, batch: Any, session: Session) -> Claims:
    """The claims of one trace, in the order met. Raises `Refused` naming a parameter unclaimed, or claimed twice."""
    tracing = Session("discover", session.shapes, session.kept_bytes, session.fused, session.rows_per_unit)
    jax.eval_shape(lambda params: losses_fn(wrap(params, tracing), batch)[0], params)
    # The trace that follows must choose the same norm forms.
    session.kept.update(tracing.kept)
    claims = tracing.claims
    _check_owners(claims, shapes_of(params))
    _check_single_use(losses_fn, params, batch, session, claims)
    return claims


def _check_owners(claims: Claims, shapes: dict[str, tuple[int, ...]]) -> None:
    owners: dict[str, list[str]] = {path: [] for path in shapes}
    for claim in claims.values():
        for path in claim.paths:
            owners[path].append(claim.op.name)
    for path, names in owners.items():
        if not names:
            reason = "no op claims this parameter, so it would not be clipped"
            raise Refused(path, reason, "Use an op of dpx.clipping.ops for it, or clipping=vmap")
        if len(names) > 1 and set(names) not in TIED:
            reason = f"claimed by {' and '.join(names)}, whose cross-term nobody adds"
            raise Refused(path, reason, "Give each its own parameter, or clipping=vmap")


def _check_single_use(losses_fn: Any, params: Any, batch: Any, session: Session, claims: Claims) -> None:
    keys = list(claims)
    records = [claims[key].record for key in keys]
    # The first array of each record stands for the whole.
    jaxpr = jax.make_jaxpr(lambda records: losses_fn(wrap(params, session, dict(zip(keys, records, strict=True))), batch)[0])(records)
    starts, at = [], 0
    for record in records:
        starts.append(at)
        at += len(jax.tree.leaves(record))
    for key, start in zip(keys, starts, strict=True):
        uses = _uses(jaxpr.jaxpr, {jaxpr.jaxpr.invars[start]})
        if uses != 1:
            reason = f"used by {key[1]} {uses} times, whose norms would overwrite each other"
            raise Refused(key[0], reason, "Give each use its own parameter, or clipping=vmap")


def _uses(jaxpr: core.Jaxpr, tapped: set) -> int:
    """How often the tapped variables reach an op: its custom rule is the only thing that reads a tap."""
    count = 0
    for eqn in jaxpr.eqns:
        hit = [index for index, var in enumerate(eqn.invars) if isinstance(var, core.Var) and var in tapped]
        if not hit:
            continue
        inner = _inner(eqn)
        if inner is None:
            count += 1
            continue
        offset = len(eqn.invars) - len(inner.invars)
        # A tap that a loop does not slice is read anew each time round.
        times = 2 if eqn.primitive.name == "scan" and min(hit) < eqn.params["num_consts"] else 1
        count += times * _uses(inner, {inner.invars[index - offset] for index in hit})
    return count


def _inner(eqn: Any) -> core.Jaxpr | None:
    """The body of a call or loop, whose last arguments line up with the equation's; None for anything else, ops included."""
    if eqn.primitive.name.startswith("custom_vjp"):
        return None
    for name in ("jaxpr", "call_jaxpr"):
        if name in eqn.params:
            found = eqn.params[name]
            return found.jaxpr if isinstance(found, core.ClosedJaxpr) else found
    return None
