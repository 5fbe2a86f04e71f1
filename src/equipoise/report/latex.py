"""Any text for LaTeX with its usual fonts and input encoding (pdflatex with no package), symbols by their commands."""

import re
import unicodedata


def _pairs(text: str) -> dict[str, str]:
    """What stands at even places, with what follows it."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


#: symbols by the name of their command in mathematics
_MATHS = _pairs("""
    ± pm × times ÷ div · cdot ∞ infty √ surd ∈ in ∑ sum ≤ leq ≥ geq ≠ neq ≈ approx
    → rightarrow ← leftarrow ↔ leftrightarrow ↑ uparrow ↓ downarrow
    α alpha β beta γ gamma δ delta ε epsilon ζ zeta η eta θ theta ι iota κ kappa λ lambda μ mu µ mu ν nu ξ xi
    π pi ρ rho σ sigma τ tau υ upsilon φ phi χ chi ψ psi ω omega
    Γ Gamma Δ Delta Θ Theta Λ Lambda Ξ Xi Π Pi Σ Sigma Φ Phi Ψ Psi Ω Omega
""")
_TEXT = _pairs(r"""
    & \& % \% $ \$ # \# _ \_ { \{ } \} \ \textbackslash{} ~ \textasciitilde{} ^ \textasciicircum{}
    < $<$ > $>$ | $|$ − $-$ ° $^\circ$ ¹ $^1$ ² $^2$ ³ $^3$ † $^\dagger$ ‡ $^\ddagger$
    – -- — --- ‐ - ‑ - ⁄ / … \ldots{} ‘ ` ’ ' “ `` ” ''
    ß \ss{} æ \ae{} Æ \AE{} œ \oe{} Œ \OE{} ø \o{} Ø \O{} ł \l{} Ł \L{} ı \i{}
""")
_COMMANDS = {character: f"$\\{name}$" for character, name in _MATHS.items()} | _TEXT | {"\xa0": "~"}
#: commands that set an accent on a letter, by the names of combining marks
_ACCENTS = _pairs(r"""
    GRAVE \` ACUTE \' CIRCUMFLEX \^ TILDE \~ MACRON \= BREVE \u DOT_ABOVE \. DIAERESIS \" RING_ABOVE \r
    DOUBLE_ACUTE \H CARON \v DOT_BELOW \d CEDILLA \c
""")


def latex_text(text: str) -> str:
    """Any text as LaTeX prints it; what has no command comes as the nearest ASCII, or as `?`."""
    quoted = re.sub(r'(?<![^\s(\[/])"', "“", unicodedata.normalize("NFC", text)).replace('"', "”")
    # Two hyphens would come out as one dash.
    return "{}".join("".join(map(_printed, part)) for part in re.split("(?<=-)(?=-)", quoted))


def _printed(character: str) -> str:
    if character in _COMMANDS:
        return _COMMANDS[character]
    if character.isascii():
        return character
    decomposed = unicodedata.normalize("NFD", character)
    letter, accents = decomposed[0], [_accent(mark) for mark in decomposed[1:]]
    if letter.isascii() and accents and all(accents):
        for accent in accents:
            letter = f"{accent}{{{letter}}}"
        return letter
    nearest = [each for each in unicodedata.normalize("NFKD", character) if each.isascii() or each in _COMMANDS]
    return "".join(map(_printed, nearest)) or "?"


def _accent(mark: str) -> str:
    """The command of a combining mark; empty where LaTeX's usual fonts have none."""
    name = unicodedata.name(mark, "").removeprefix("COMBINING ").removesuffix(" ACCENT")
    return _ACCENTS.get(name.replace(" ", "_"), "")
