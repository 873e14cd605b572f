"""The paper's theorems and propositions, computed: what is claimed, what is measured."""
