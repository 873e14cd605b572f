"""torch.compile captures a training step as one graph, with the same loss and gradients."""

import torch

from tests.unit.tiny_models import cat_model, each_variant, random_ids


@each_variant()
def test_training_step_compiles_without_a_graph_break(variant):
    torch._dynamo.reset()
    ids = random_ids(2, 40)
    document_ids = (torch.arange(40) // 15).expand(2, 40)
    model = cat_model(**variant, num_hidden_layers=1).train()
    names = list(model.state_dict())
    results = []
    for compiled in (False, True):
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
            assert list(model.state_dict()) == names
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, document_ids=document_ids).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
