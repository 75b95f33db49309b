# %% [markdown]
# # Comparing mechanisms
#
# DP-SGD adds independent noise to each step. Correlated noise, of which λCGD is the simplest kind, takes some of it
# back later, so that less stays in the sum of all steps. This notebook looks at that noise and compares mechanisms at
# the same (ε, δ). Nothing is trained.

# %%
import numpy as np
from matplotlib.figure import Figure

import lambdacgd as lc

request = {"examples": 400, "batch_size": 20, "epochs": 2, "epsilon": 2.0, "delta": 1e-4}

# %% [markdown]
# ## More noise in a step, less in the sum

# %%
plain = lc.plan(**request, mechanism=lc.Identity(), sampling=lc.Poisson())
strong = lc.plan(**request, mechanism=lc.LambdaCGD(0.7))
for plan in (plain, strong):
    print(plan, end="\n\n")

# %%
z = np.random.default_rng(0).standard_normal((strong.steps_per_epoch, 500))
independent = plain.sigma * z
correlated = strong.sigma * (z - 0.7 * np.vstack([np.zeros((1, 500)), z[:-1]]))

figure = Figure(figsize=(8, 3))
left, right = figure.subplots(ncols=2)
for noise, name in ((independent, "DP-SGD"), (correlated, "λCGD, λ = 0.7")):
    left.plot(noise.std(1), label=name)
    right.plot(noise.cumsum(0).std(1), label=name)
left.set_title("standard deviation of one step's noise")
right.set_title("… and of the sum of all steps so far")
for axes in (left, right):
    axes.set_xlabel("step of an epoch")
    axes.set_ylim(0)
    axes.legend()
figure.tight_layout()
figure

# %% [markdown]
# ## How much should be taken back?
#
# A larger λ cancels more and needs more noise to begin with. `plan.rmse` puts the two together.

# %%
for lam in (0.0, 0.4, 0.7, 0.9):
    plan = lc.plan(**request, mechanism=lc.LambdaCGD(lam))
    print(f"λ = {lam:.1f}   σ = {plan.sigma:5.2f}   RMSE = {plan.rmse:5.2f}")

# %% [markdown]
# ## All mechanisms
#
# `lc.compare` plans the same run with each of them; here without amplification, which is quick. Some store noise (the
# last column, in copies of the model); λCGD and others like it compute it again from the key.

# %%
for plan in lc.compare(**request, sampling=lc.Cyclic()):
    steps = plan.block.steps
    stored = 0 if plan.mechanism.regenerates(steps) else plan.mechanism.past_vectors(steps)
    print(f"{plan.mechanism!s:<28} σ = {plan.sigma:6.2f}   RMSE = {plan.rmse:6.2f}   stored: {stored}")

# %% [markdown]
# Leave `sampling` out to compare under Balls-in-Bins, as training does by default. For a large run that takes minutes
# the first time.
