import sys

import torch.distributed as dist

from ndtp.collectives import last_words


def test_an_error_is_told_once_however_many_worlds_there_were(monkeypatch):
    """Torch puts a hook around the last one whenever a world begins."""
    told, printed = [], []
    monkeypatch.setattr(sys, "excepthook", lambda *of_error: printed.append(of_error))
    monkeypatch.setattr(last_words, "tell_of", lambda error: told.append(error) or error)
    for _ in range(3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        last_words.speak_at_the_end()
        dist.destroy_process_group()
    error = ValueError("lost")
    sys.excepthook(ValueError, error, None)
    assert told == [error]
    assert len(printed) == 1
    monkeypatch.setattr(sys, "excepthook", lambda *of_error: printed.append(of_error))
    last_words.speak_at_the_end()
    sys.excepthook(ValueError, error, None)
    assert told == [error, error], "a hook of the user's alone tells nobody"
