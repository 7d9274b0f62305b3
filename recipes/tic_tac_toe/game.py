"""Tic-tac-toe, one policy on both sides: `--environment recipes/tic_tac_toe/game.py:Game`.

    python recipes/tic_tac_toe/game.py --to runs/tic_tac_toe_rows

writes what recipes/tic_tac_toe.yaml reads: in model/ the configuration of a small Llama and a
tokenizer of characters; random_games.jsonl, games of random moves to learn the rules from;
openings.jsonl, the random beginnings from which the policy plays against itself; random.jsonl and
perfect.jsonl, opponents for an evaluation, half of the games for each side.

The policy reads the board, in which empty cells are numbers, and the side to move, as in
"1X34O6789X ". It writes a cell and a line break. In training it moves for both sides. Each reward
is that of the side that has just moved: 1 if it wins, -1 if its move is none, else 0. With
`--algorithm.gamma -1` the return of a move is what its side gets in the end, since one side wins
what the other loses.

In an evaluation the row says which `side` the policy plays, and who plays the other one: `random`,
or `perfect`, which never loses. The reward is then 1, 0 or -1 for the policy.
"""

import argparse
import functools
import json
import random
from pathlib import Path

LINES = ("123", "456", "789", "147", "258", "369", "159", "357")

ALPHABET = "123456789XO no mver\n"
GAMES = 4000
OPENINGS = 512
HELD_OUT = 200
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Game:
    def reset(self, moves, side, opponent, seed, is_evaluation):
        """Begin after some moves; the policy plays both sides unless this is an evaluation."""
        self.board = "." * 9
        for cell in moves:
            self.board = after(self.board, cell)
        self.side = side if is_evaluation else ""
        self.opponent = opponent
        self.random = random.Random(seed)
        if self.side:
            self._let_opponent_move()
        return shown(self.board)

    def step(self, text):
        """Make a move. Returns (what the policy reads, the reward of the mover, done, {})."""
        cell = text.strip()
        if cell not in legal_moves(self.board):
            return "no move", -1.0, True, {}
        self.board = after(self.board, cell)
        if not is_over(self.board) and self.side:
            self._let_opponent_move()
        if not is_over(self.board):
            return shown(self.board), 0.0, False, {}
        won = winner(self.board)
        loses = bool(self.side) and won not in ("", self.side)
        return "over", -1.0 if loses else float(bool(won)), True, {}

    def _let_opponent_move(self):
        while not is_over(self.board) and to_move(self.board) != self.side:
            moves = legal_moves(self.board)
            if self.opponent == "perfect":
                best = max(-value(after(self.board, cell)) for cell in moves)
                moves = [cell for cell in moves if -value(after(self.board, cell)) == best]
            self.board = after(self.board, self.random.choice(moves))


def to_move(board):
    return "X" if board.count("X") == board.count("O") else "O"


def legal_moves(board):
    """Return the empty cells, as "1" to "9"; none if the game is over."""
    return [] if is_over(board) else [str(i + 1) for i in range(9) if board[i] == "."]


def after(board, cell):
    """Return the board after the move of the side whose turn it is."""
    i = int(cell) - 1
    return board[:i] + to_move(board) + board[i + 1 :]


def winner(board):
    """Return "X", "O" or ""."""
    for line in LINES:
        marks = {board[int(cell) - 1] for cell in line}
        if len(marks) == 1 and marks != {"."}:
            return marks.pop()
    return ""


def is_over(board):
    return bool(winner(board)) or "." not in board


@functools.cache
def value(board):
    """Return 1, 0 or -1: what the side to move gets if both play perfectly."""
    if winner(board):
        return -1
    return max((-value(after(board, cell)) for cell in legal_moves(board)), default=0)


def shown(board):
    """Return what the policy reads: the cells, by number if empty, and the side to move."""
    cells = [str(i + 1) if mark == "." else mark for i, mark in enumerate(board)]
    return f"{''.join(cells)}{to_move(board)} "


def random_game(rng):
    """Return a game of random moves: what the policy reads first, and the transcript after it."""
    board = "." * 9
    prompt = "\n" + shown(board)
    transcript = ""
    while not is_over(board):
        cell = rng.choice(legal_moves(board))
        board = after(board, cell)
        transcript += f"{cell}\n"
        if not is_over(board):
            transcript += shown(board)
    return {"prompt": prompt, "completion": transcript}


def openings(rng):
    """Return rows of training: up to six random moves that both sides have made already."""
    rows = []
    for number in range(OPENINGS):
        board, moves = "." * 9, ""
        for _ in range(number % 7):
            cell = rng.choice(legal_moves(board))
            if is_over(after(board, cell)):
                break
            board, moves = after(board, cell), moves + cell
        rows.append({"prompt": "\n", "moves": moves, "side": "", "opponent": ""})
    return rows


def opponents(name):
    """Return rows of an evaluation from the empty board."""
    sides = ("X", "O")
    return [
        {"prompt": "\n", "moves": "", "side": sides[number % 2], "opponent": name}
        for number in range(HELD_OUT)
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows written to {path}")


def main():
    from tpu_rl import tokenizers  # Workers that play import this file, and need it not.

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="the directory to write")
    directory = parser.parse_args().to
    tokenizer = tokenizers.characters("".join(dict.fromkeys(ALPHABET)))
    tokenizer.save_pretrained(directory / "model")
    config = MODEL | {"vocab_size": tokenizer.vocab_size}
    (directory / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = random.Random(0)
    write(directory / "random_games.jsonl", [random_game(rng) for _ in range(GAMES)])
    write(directory / "openings.jsonl", openings(rng))
    for name in ("random", "perfect"):
        write(directory / f"{name}.jsonl", opponents(name))


if __name__ == "__main__":
    main()
