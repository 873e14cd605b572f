"""torch.compile captures a training step as one graph, with the same loss and gradients."""

import torch

from tests.unit.tiny_models import cat_model, random_ids


def test_training_step_compiles_without_a_graph_break():
    ids = random_ids(2, 40)
    document_ids = (torch.arange(40) // 15).expand(2, 40)
    model = cat_model(num_hidden_layers=1).train()
    results = []
    for step in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        loss = step(input_ids=ids, labels=ids, document_ids=document_ids).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
