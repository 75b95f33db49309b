# %% [markdown]
# # Quickstart: private training in PyTorch
#
# We train a small network on handwritten digits so that no single image can be recognised in the result, watch what it
# costs, and publish the weights with a privacy card. It takes some seconds on a laptop.

# %%
import torch
import torch.nn.functional as F

import lambdacgd as lc
from lambdacgd import digits

torch.manual_seed(0)
train, test = digits.load()
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
len(train), len(test)

# %% [markdown]
# ## The plan
#
# A plan fixes everything that decides privacy: how many passes over the data, how batches are drawn, how noise is
# correlated, and how much of it the promise (ε, δ) needs. Nothing is trained yet, and no data is looked at.
# Without `mechanism` the best λ is searched for, which takes a little longer.

# %%
plan = lc.plan(train, 16, epochs=3, epsilon=4.0, delta=1e-4, mechanism=lc.LambdaCGD(0.8))
plan

# %% [markdown]
# ## The loop
#
# An ordinary loop. The batches come from the plan, and `optimizer.step()` adds the noise before it acts.
# `loss=` has the loss looked at once: an example's gradient must not depend on the others in its batch.
# `earlier=[]` declares that these weights have seen no private data before.


# %%
def loss_of(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


private = lc.privatize(model, optimizer, train, plan, max_grad_norm=1.0, loss=loss_of, earlier=[])


def accuracy():
    images, labels = test.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


for epoch in private.epochs():
    for batch in epoch:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch.number}: test accuracy {accuracy():.0%}, {private.spent()}")

# %% [markdown]
# ## The release
#
# The card says what holds for these weights, and what does not.

# %%
lc.export(private, "release")
private.card()

# %% [markdown]
# ## What would other budgets have cost?
#
# The same run at ε = 1 needs more noise. These calls train nothing.

# %%
for epsilon in (1.0, 4.0, 8.0):
    print(f"ε = {epsilon:g}: σ = {lc.noise_multiplier(plan, epsilon=epsilon, delta=1e-4):.3f}")
