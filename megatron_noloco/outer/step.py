"""The algorithm on one page: the outer step of NoLoCo as three pure functions of tensors.

For replica i in a group G of n replicas, after k local steps (arXiv 2506.10911, Eq. 1-3; the sign of beta as in
the authors' code and their Eq. 32):

    Delta_i  =  theta_i - phi_i                                                                 (1)
    delta_i <-  alpha * delta_i + beta * mean_G(Delta) - gamma * (phi_i - mean_G(phi))          (2)
    phi_i   <-  phi_i + delta_i,    theta_i <- phi_i                                            (3)

| symbol | name                  | meaning                                              |
|--------|-----------------------|------------------------------------------------------|
| theta  | fast weights          | what the inner optimizer moves                       |
| phi    | slow weights          | the replica's weights after its last round           |
| Delta  | outer gradient        | what k local steps changed (pseudo-gradient)         |
| delta  | outer momentum buffer |                                                      |
| alpha  | outer_momentum        | share of delta that is kept                          |
| beta   | outer_lr              | weight of the group's mean outer gradient            |
| gamma  | consensus_weight      | pull towards the group's mean slow weights           |
| c      | combined vector       | all that a replica sends                             |
| r      | rounding error        | what the code of c leaves out; kept in int3 and      |
|        |                       | int4 in a group of more than 2, for the next c       |

Both means enter (2) only as beta * mean(Delta) + gamma * mean(phi) = mean(c), so one vector travels, not two:

    c_i      =  beta * Delta_i + gamma * phi_i  =  beta * theta_i + (gamma - beta) * phi_i      `combine`
    delta_i <-  alpha * delta_i + mean_G(c) - gamma * phi_i,    phi_i <- phi_i + delta_i        `outer_step`

With Nesterov's look-ahead (`outer_nesterov`) phi moves by what delta would be one round later, if that brought the
same u = mean_G(c) - gamma * phi_i once more. This is the step of torch.optim.SGD(nesterov=True) with momentum
alpha and lr beta, on minus the outer gradient:

    phi_i   <-  phi_i + alpha * delta_i + u         with the new delta_i                        (4)

Written like this, replicas with equal phi and delta take bitwise equal steps. With all replicas in one group and
equal phi the gamma terms cancel: DiLoCo's outer step with momentum. Alone (n = 1, a skipped round) it is
delta <- alpha * delta + beta * Delta.

With a delay of d local steps training goes on while c travels: theta_s = theta is noted, the local steps continue
from it, and d steps later the outcome is merged. All local steps are kept; without delay this is (3):

    theta_i <-  theta_i + (phi_i - theta_s)                                                     `merge`

`round` says what the delay changes, `plans.stability` when replicas stay together. All functions work element by
element, on any device and dtype; `out` names the memory of the results, which may be that of the arguments. A
product and a sum are two operations: torch's `add(alpha=...)` rounds once on some processors and twice on others.
"""

import torch
from torch import Tensor


def combine(theta: Tensor, phi: Tensor, beta: float, gamma: float, out: Tensor | None = None) -> Tensor:
    """Return c, the combined vector; all tensors have one shape."""
    c = torch.mul(theta, beta, out=out)
    return c.add_(torch.mul(phi, gamma - beta)) if gamma != beta else c


def outer_step(
    phi: Tensor,
    delta: Tensor,
    mean_c: Tensor,
    alpha: float,
    gamma: float,
    nesterov: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return phi and delta after the round, from the mean of c over the group; all tensors have one shape."""
    new_phi, new_delta = (None, None) if out is None else out
    u = torch.mul(phi, -gamma).add_(mean_c)
    new_delta = torch.mul(delta, alpha, out=new_delta).add_(u)
    step = u.add_(torch.mul(new_delta, alpha)) if nesterov else new_delta
    return torch.add(phi, step, out=new_phi), new_delta


def merge(theta: Tensor, correction: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the fast weights moved by the correction phi - theta_s of a round with delay."""
    return torch.add(theta, correction, out=out)
