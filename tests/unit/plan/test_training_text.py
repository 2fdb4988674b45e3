from __future__ import annotations

import pytest

from fivefold.core.errors import PlanError
from fivefold.plan.training_text import training
from fivefold.plan.workload import Training


def test_words_become_a_workload() -> None:
    assert training("seq=4096,batch=512,tokens=1T") == Training(4096, 512, 1e12)
    assert training(" sequence=8k , batch_tokens=16M,precision=FP8,optimizer=sgd") == Training(
        8000, 2000, None, "fp8", "sgd"
    )
    assert training("seq=4096,batch=8,tokens=1.5B").tokens == 1.5e9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch=512", "does not say `seq`"),
        ("seq=4096", "does not say `batch`"),
        ("seq=4096,batch=512,tokns=1T", "unknown workload key 'tokns'; did you mean 'tokens'?"),
        ("seq=4096,batch=0", "no number above 0"),
        ("seq=4096,batch=1.5", "no whole number"),
        ("seq=4096,batch=many", "no number above 0"),
        ("seq=4096,batch", "is not KEY=VALUE"),
        ("seq=4096,batch=8,batch=9", "says 'batch' twice"),
        ("seq=4096,batch=8,batch_tokens=1M", "`batch` and `batch_tokens`"),
        ("seq=4096,batch_tokens=1M", "no multiple of sequences of 4096; use batch=244"),
        ("seq=4096,batch=8,precision=bf17", "unknown compute 'bf17'; did you mean 'bf16'?"),
        ("rate=20,input=2000", "use `fivefold plan serve`"),
    ],
)
def test_bad_words_name_themselves(text: str, says: str) -> None:
    with pytest.raises(PlanError) as refused:
        training(text)
    assert says in str(refused.value)
