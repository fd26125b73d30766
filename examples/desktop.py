"""A chat window in Tk: an answer streams in, Stop ends it. `python examples/desktop.py [MODEL]`.

Tk is not safe to call from other threads, so replies are read in a thread and their events handed over in a queue.
"""

from __future__ import annotations

import sys
import threading
import tkinter as tk
from queue import Empty, SimpleQueue
from tkinter import ttk

import lisa

EVERY = 30  # milliseconds between looks into the queue


class Window:
    """One conversation with `model`, what `lisa.load` returns."""

    def __init__(self, root: tk.Tk, model):
        self.root, self.model = root, model
        self.messages = []
        self.reply = None
        self.events = SimpleQueue()
        root.title(f"Lisa: {model.name}")
        self.log = tk.Text(root, wrap="word", width=72, height=20, padx=8, pady=8, state="disabled")
        self.log.tag_configure("you", font=("TkDefaultFont", 11, "bold"))
        self.log.tag_configure("thought", foreground="grey50")
        self.entry = ttk.Entry(root)
        self.send = ttk.Button(root, text="Send", command=self.ask)
        self.stop = ttk.Button(root, text="Stop", command=self.cancel, state="disabled")
        self.status = ttk.Label(root, text=model.about)
        self._place()
        self.entry.bind("<Return>", lambda _: self.ask())
        root.protocol("WM_DELETE_WINDOW", self.close)
        self.entry.focus()
        self._look()

    def _place(self) -> None:
        self.log.grid(row=0, column=0, columnspan=3, sticky="nsew", padx=8, pady=8)
        self.entry.grid(row=1, column=0, sticky="ew", padx=8)
        self.send.grid(row=1, column=1)
        self.stop.grid(row=1, column=2, padx=8)
        self.status.grid(row=2, column=0, columnspan=3, sticky="w", padx=8, pady=8)
        self.root.columnconfigure(0, weight=1)
        self.root.rowconfigure(0, weight=1)

    def ask(self) -> None:
        text = self.entry.get().strip()
        if not text or self.reply is not None:
            return
        self.entry.delete(0, "end")
        self._write(f"{text}\n", "you")
        self.messages.append({"role": "user", "content": text})
        self.answer = ""
        try:
            self.reply = self.model.chat(self.messages)
        except lisa.LisaError as error:
            self._end(str(error))
            return
        self.send["state"], self.stop["state"] = "disabled", "normal"
        threading.Thread(target=self._read, args=(self.reply,), daemon=True).start()

    def _read(self, reply) -> None:
        """In a thread of its own: nothing here touches Tk."""
        try:
            for event in reply:
                self.events.put(event)
        except lisa.LisaError as error:
            self.events.put(error)

    def cancel(self) -> None:
        if self.reply is not None:
            self.reply.cancel()

    def _look(self) -> None:
        try:
            while True:
                self._take(self.events.get_nowait())
        except Empty:
            self._next = self.root.after(EVERY, self._look)

    def _take(self, event) -> None:
        if isinstance(event, lisa.Tokens):
            self._write(event.reasoning, "thought")
            self._write(event.text)
            self.answer += event.text
        elif isinstance(event, lisa.Done):
            speed = event.stats.tokens_per_second
            self._end(f"{event.stats.completion_tokens} tokens, {speed or 0:.1f} tok/s, {event.reason}")
        elif isinstance(event, lisa.LisaError):
            self._end(str(event))

    def _end(self, status: str) -> None:
        if self.answer:
            self.messages.append({"role": "assistant", "content": self.answer})
        else:
            self.messages.pop()  # nothing was answered
        self._write("\n\n")
        self.reply = None
        self.status["text"] = status
        self.send["state"], self.stop["state"] = "normal", "disabled"

    def _write(self, text: str, tag: str = "") -> None:
        self.log["state"] = "normal"
        self.log.insert("end", text, tag)
        self.log["state"] = "disabled"
        self.log.see("end")

    def close(self) -> None:
        self.cancel()
        self.root.after_cancel(self._next)
        self.root.destroy()


def main() -> None:
    try:
        model = lisa.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m", say=lambda line: print(line))
    except lisa.LisaError as error:
        sys.exit(f"desktop: {error}")
    with model:
        root = tk.Tk()
        Window(root, model)
        root.mainloop()


if __name__ == "__main__":
    main()
