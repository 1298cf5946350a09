"""Answers to the prompts of this console: asked for, streamed to the Prompt screen, cancelled. A part of ConsoleApp."""

from __future__ import annotations

from console import messages


class AnswerOrders:
    """Handlers of the Prompt screen's orders and of the bridge's news about them."""

    def on_answer_admitted(self, event: messages.AnswerAdmitted) -> None:
        self.prompt.admitted(event)

    def on_answer_tokens(self, event: messages.AnswerTokens) -> None:
        self.prompt.tokens(event)

    def on_answer_finished(self, event: messages.AnswerFinished) -> None:
        self.prompt.finished(event)

    def on_answer_failed(self, event: messages.AnswerFailed) -> None:
        self.prompt.fail(event.turn, event.reason)

    def on_answers_unwanted(self) -> None:
        self.workers.cancel_group(self, "answer")

    def on_answer_wanted(self, event: messages.AnswerWanted) -> None:
        self.run_worker(
            self.bridge.answer(event.turn, event.request), name="answer", group="answer", exit_on_error=False
        )

    def action_cancel(self) -> None:
        turn = self.prompt.conversation.open_turn
        if turn is None:
            others = any(each.state != "finished" for each in self.view.requests)
            also = "; r on the Live screen goes to the requests of others" if others else ""
            self._notice(f"nothing to cancel: no answer is being written here{also}")
        elif self.prompt.withdraw():
            self._notice("the waiting prompt is back in the input")
        elif turn.request_id is not None:
            self._notice("cancelling the answer")
            self.run_worker(self.bridge.cancel(turn.request_id), name="cancel", exit_on_error=False)
        else:
            self.workers.cancel_group(self, "answer")
            self.prompt.fail(turn.number, "cancelled before it was admitted")
