"""What is changed in torch once a process, and what a thread reads while another one hears."""

import sys
import threading
from types import ModuleType, SimpleNamespace

from ndtp.collectives import torch_patches
from ndtp.collectives.answers import Answers
from ndtp.collectives.flight import Flight
from ndtp.collectives.verdict import ANSWER, Event


def test_two_threads_patch_once(monkeypatch):
    """The second one comes while the first one wraps, and waits."""
    torch_like = SimpleNamespace(call=lambda: 1)
    monkeypatch.setitem(torch_patches.PATCHES, "torch.like.call", torch_patches.Patch("a test", "it ends"))
    monkeypatch.setattr(torch_patches.pkgutil, "resolve_name", lambda _: torch_like)
    monkeypatch.setattr(torch_patches, "_REPLACED", set())
    second = threading.Thread(target=lambda: torch_patches.replaced("torch.like.call", wrap))

    wrapped = []

    def wrap(given):
        wrapped.append(given)
        if not second.ident:
            second.start()
            second.join(0.1)  # as long as it takes where nothing holds it
        return lambda: given() + 1

    torch_patches.replaced("torch.like.call", wrap)
    second.join()
    assert len(wrapped) == 1 and torch_like.call() == 2


class Lazy:
    """What stands for a module and imports it when it is asked for anything."""

    @property
    def __dict__(self):
        raise ImportError("it is not installed")


def test_who_has_imported_what_is_replaced_calls_the_other_one(monkeypatch):
    """As tensordict has vmap's; what torch itself has imported stays."""
    torch_like = SimpleNamespace(call=lambda: 1)
    users = {name: ModuleType(name) for name in ("a_library.functions", "torch.imports_it", "of_its_own")}
    monkeypatch.setitem(sys.modules, "asks_for_more", Lazy())
    for name, user in users.items():
        user.call = torch_like.call if name != "of_its_own" else len
        monkeypatch.setitem(sys.modules, name, user)
    monkeypatch.setitem(torch_patches.PATCHES, "torch.like.call", torch_patches.Patch("a test", "it ends"))
    monkeypatch.setattr(torch_patches.pkgutil, "resolve_name", lambda _: torch_like)
    monkeypatch.setattr(torch_patches, "_REPLACED", set())
    torch_patches.replaced("torch.like.call", lambda given: lambda: given() + 1)
    assert users["a_library.functions"].call() == torch_like.call() == 2
    assert users["torch.imports_it"].call() == 1 and users["of_its_own"].call is len


class HearsMore(float):
    """A time that is compared while the thread of `Presence` hears of one more rank."""

    def __ge__(self, since):
        ANSWERS.heard([Event(len(ANSWERS._heard) + 1, ANSWER, "", 1.0, (0,))])
        return True


ANSWERS = Answers(0, Flight(0, 4))


def test_answers_are_read_while_more_are_heard():
    ANSWERS.heard([Event(1, ANSWER, "", HearsMore(1.0)), Event(2, ANSWER, "all_gather", HearsMore(1.0), (0, 2))])
    assert ANSWERS.free(0.0) == {1} and set(ANSWERS.waiting(0.0)) == {2, 3, 4}
