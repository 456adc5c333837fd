# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 - a line is a ground truth with its answers, in the signs that answers are written in
"""Answers, right and wrong, each in many notations; verdicts by hand."""

ROWS: list[tuple[str, str, int]] = []  # ground truth, answer, 1 where it is right


def ok(truth: str, *answers: str) -> None:
    ROWS.extend((truth, answer, 1) for answer in answers)


def no(truth: str, *answers: str) -> None:
    ROWS.extend((truth, answer, 0) for answer in answers)


# roots, powers
ok(
    r"\frac{1}{\sqrt{m}}",
    r"\sqrt{1/m}",
    r"\sqrt{\frac{1}{m}}",
    r"m^{-1/2}",
    r"\frac{\sqrt{m}}{m}",
    r"1/\sqrt m",
    r"\sqrt{m^{-1}}",
)
no(r"\frac{1}{\sqrt{m}}", r"\sqrt{m}", r"\sqrt{1/n}", r"-\sqrt{1/m}", r"\sqrt{2/m}", r"\frac{1}{m}")
ok(r"\sqrt{x^2+2x+1}", r"\sqrt{(x+1)^2}", r"|x+1|", r"\left|x+1\right|")
no(r"\sqrt{x^2+2x+1}", r"x+1", r"\sqrt{(x-1)^2}", r"\sqrt{x^2+1}")
no("x", r"\sqrt{x^2}", "|x|")
ok(r"\sqrt{ab}", r"\sqrt{a b}", r"(ab)^{1/2}")
ok(r"\frac{a}{\sqrt{b}}", r"a\sqrt{\frac{1}{b}}", r"\frac{a\sqrt{b}}{b}")
ok(r"\sqrt{\frac{a}{b}}", r"\sqrt{a/b}", r"\frac{\sqrt{ab}}{b}")
ok(r"x^{3/2}", r"x\sqrt{x}", r"\sqrt{x^3}")
ok(r"\sqrt[3]{x^2}", r"x^{2/3}", r"x^{\frac23}")
ok(r"(x-1)^2", "x^2-2x+1", "(1-x)^2")
ok(r"\frac{x^2-1}{x-1}", "x+1")
ok(r"\sin^2 x", r"1-\cos^2 x", r"\frac{1-\cos 2x}{2}", r"\sin^2(x)", r"(\sin x)^2")
no(r"\sin^2 x", r"\cos^2 x", r"\sin x^2")
ok(r"\tan x", r"\frac{\sin x}{\cos x}")
ok(r"\ln(x^2)", r"2\ln|x|", r"\ln x^2")
ok(r"2\ln x", r"\ln x^2", r"\ln(x^2)", r"\log_e x^2")
ok(r"\frac{\ln 3}{\ln 2}", r"\log_2 3", r"\log_{2}{3}", r"\log_2(3)")
no(r"\frac{\ln 3}{\ln 2}", r"\log_3 2", r"\ln\frac32")
# complex
ok(
    r"e^{i\pi/3}",
    r"\frac{1}{2}+\frac{\sqrt{3}}{2}i",
    r"\frac{1+i\sqrt{3}}{2}",
    r"\cos\frac{\pi}{3}+i\sin\frac{\pi}{3}",
    r"\exp(i\pi/3)",
    r"e^{\frac{\pi i}{3}}",
    r"\mathrm{e}^{\mathrm{i}\pi/3}",
)
no(r"e^{i\pi/3}", r"\frac{1}{2}-\frac{\sqrt{3}}{2}i", r"e^{-i\pi/3}", r"\frac{1}{2}+\frac{\sqrt{3}}{2}", r"e^{\pi/3}")
ok("i", "e^{i\\pi/2}", r"\sqrt{-1}", r"\mathrm{i}")
ok("-1", r"e^{i\pi}", "i^2")
ok("6 - 5i", "6-5i", "-5i+6", r"6-5\mathrm{i}", "6 − 5i", "6 – 5i")
no("6 - 5i", "6+5i", "5-6i", "-6+5i")
ok("1+i", r"\sqrt{2}e^{i\pi/4}", r"\sqrt2 (\cos\frac\pi4 + i\sin\frac\pi4)")
ok("-2 + 7i", "7i-2", r"7i - 2")
# logs
ok(
    r"\ln 2",
    r"\log_e 2",
    r"\log_{e} 2",
    r"\log_{e}{2}",
    r"\ln(2)",
    r"\log_{e}(2)",
    r"\ln{2}",
    r"-\ln\frac12",
    r"\frac{\ln 4}{2}",
    r"\operatorname{ln} 2",
    r"\mathrm{ln}\, 2",
    "ln 2",
    "ln(2)",
    r"\ln\left(2\right)",
)
no(r"\ln 2", r"\ln 3", r"\log_2 e", r"-\ln 2", r"\log_{10} 2", "2", r"e^2")
ok(r"\log_{10} 2", r"\lg 2", r"\log_{10}(2)")
ok(r"1+\ln 2", r"\ln(2e)", r"\ln 2 + 1", r"\log_e(2e)")
ok("e", r"e", r"\mathrm{e}", r"\text{e}", r"\exp(1)")
# sets
ok(r"\emptyset", r"\varnothing", "∅", r"\{\}", r"\{ \}", r"\left\{\right\}", r"x \in \emptyset", r"\text{Ø}")
no(r"\emptyset", "0", r"\{0\}", r"\{\emptyset\}", r"\mathbb{R}")
ok(r"\varnothing", r"\emptyset")
ok(r"\mathbb{R}", r"(-\infty,\infty)", r"(-\infty, +\infty)", r"x\in\mathbb{R}", r"\mathbf{R}", r"\mathbb R", "ℝ")
ok(
    r"\{1,2,3\}",
    r"\{3,2,1\}",
    r"\left\{1,2,3\right\}",
    r"\lbrace 1,2,3\rbrace",
    "1, 2, 3",
    r"1, 2 \text{ and } 3",
    r"1,2,\text{ and }3",
    r"x \in \{1,2,3\}",
)
no(r"\{1,2,3\}", r"\{1,2\}", r"\{1,2,3,4\}", "(1,2,3)", "6")
ok(r"\{-1, 1\}", r"\pm 1", r"x = \pm 1", "x=1, x=-1", r"x=1 \text{ or } x=-1", "1, -1", "−1, 1", r"\{\pm 1\}")
# tuples
ok(
    r"(3, \frac{\pi}{2})",
    r"\left(3,\frac\pi2\right)",
    r"(3,\pi/2)",
    r"\left(3, \dfrac{\pi}{2}\right)",
    r"\big(3,\tfrac{\pi}{2}\big)",
    r"(3,\; \frac{\pi}{2})",
    r"\Bigl(3,\frac{\pi}{2}\Bigr)",
    r"(3.0, \frac{1}{2}\pi)",
    r"(r,\theta) = (3, \frac{\pi}{2})",
    r"\left( 3, \frac{\pi}{2} \right).",
    r"\langle 3, \frac{\pi}{2}\rangle",
)
no(
    r"(3, \frac{\pi}{2})",
    r"(\frac\pi2, 3)",
    r"(3, \frac{2}{\pi})",
    r"(3,\frac\pi3)",
    r"\{3, \frac{\pi}{2}\}",
    "3",
    r"(3, \frac{\pi}{2}, 0)",
)
ok(
    r"\frac{\pi}{2}",
    r"\frac\pi2",
    r"\frac \pi 2",
    r"\frac{\pi}2",
    r"\frac\pi{2}",
    r"\dfrac\pi2",
    r"\pi/2",
    r"0.5\pi",
    r"\frac{1}{2}\pi",
    "π/2",
    r"\tfrac{\pi}{2}",
    r"{\pi \over 2}",
)
no(r"\frac{\pi}{2}", r"\frac2\pi", r"\frac\pi3", r"\pi2", r"\frac{\pi}{22}")
ok(r"\frac{1}{x}", r"\frac1x", r"1/x", "x^{-1}")
ok(r"\frac{x}{2}", r"\frac x2", r"\frac{1}{2}x", "0.5x", "x/2")
ok(r"\frac{a}{b}", r"\frac ab", r"\frac{a}b", "a/b", r"a \div b")
no(r"\frac{a}{b}", r"\frac ba", "ab")
ok(
    r"\sqrt{2}",
    r"\sqrt2",
    r"2^{1/2}",
    "√2",
    "√{2}",
    "√(2)",
    r"\sqrt 2",
    "sqrt(2)",
    "sqrt{2}",
    r"\frac{2}{\sqrt2}",
    r"2^{0.5}",
)
ok(
    r"\frac{\sqrt3}{2}",
    r"\frac{\sqrt{3}}2",
    r"\frac{\sqrt 3}{2}",
    "√3/2",
    r"\sqrt{3}/2",
    r"\sqrt{\frac34}",
    r"\frac12\sqrt3",
    r"\tfrac{\sqrt3}{2}",
)
ok(
    "-\\frac{1}{2}",
    r"\frac{-1}{2}",
    r"\frac{1}{-2}",
    "-1/2",
    "−1/2",
    "–1/2",
    r"-\tfrac12",
    "-.5",
    "- 0.5",
    r"\text{-}\frac12",
    r"\text{-0.5}",
    "−0.5",
)
no("-\\frac{1}{2}", r"\frac12", "-2", "-0.05")
# conditions
ok(
    r"2k\pi, k \in \mathbb{Z}",
    r"2\pi k \quad (k \in \mathbb{Z})",
    r"2\pi k, \; k\in\mathbb Z",
    r"2k\pi \text{ where } k \in \mathbb{Z}",
    r"2\pi k",
    r"2k\pi\ (k\in\mathbb{Z})",
    r"2\pi k \text{ for } k \in \mathbb{Z}",
    r"x = 2k\pi, k \in \mathbb{Z}",
    r"2 k \pi, \text{ } k \in \mathbb{Z}",
    r"2\pi k, k \in Z",
    r"2n\pi, n \in \mathbb{Z}",
    r"2k\pi \text{ for any integer } k",
    r"2k\pi, \text{where } k \text{ is an integer}",
)
no(
    r"2k\pi, k \in \mathbb{Z}",
    r"k\pi, k \in \mathbb{Z}",
    r"2k\pi+1, k\in\mathbb{Z}",
    r"2k\pi, k \in \mathbb{N}",
    r"4k\pi, k\in\mathbb Z",
    r"2k, k \in\mathbb{Z}",
    r"k \in \mathbb{Z}",
    r"2\pi, k\in\mathbb{Z}",
)
ok(
    r"x = \frac{\pi}{4} + k\pi, k \in \mathbb{Z}",
    r"\frac{\pi}{4} + k\pi \quad (k \in \mathbb{Z})",
    r"k\pi + \frac{\pi}{4}",
    r"\frac\pi4 + \pi n, n \in \mathbb{Z}",
    r"x=\frac{\pi}{4}+n\pi\text{ for integer }n",
)
no(
    r"x = \frac{\pi}{4} + k\pi, k \in \mathbb{Z}",
    r"\frac{\pi}{4} + 2k\pi, k\in\mathbb{Z}",
    r"-\frac{\pi}{4}+k\pi, k \in\mathbb{Z}",
)
ok(r"3n+1, n \ge 0", r"3n+1 \quad (n\ge 0)", r"3n+1, n \geq 0")
ok(r"f(x) = x^2 + 1", r"x^2+1", r"f(x)=1+x^2")
# units
for u in (
    r"60 km/h",
    r"60\text{ km/h}",
    r"60\ \text{km/h}",
    r"60 \mathrm{~km/h}",
    r"60\,\mathrm{km}/\mathrm{h}",
    r"60 km per hour",
    r"60 \text{ km per hour}",
    r"60 kilometers per hour",
    r"60\;\text{km}\cdot\text{h}^{-1}",
    r"60\,\mathrm{km\,h^{-1}}",
    r"60 mph",
    r"60\text{ mi/h}",
    r"60 m/s",
    r"60\frac{\text{km}}{\text{h}}",
    r"60 \text{ miles per hour}",
    "60 km / h",
    r"60\ \mathrm{m/s^2}",
    r"60\text{ m}^2",
    "60 m^2",
    "60 m²",
    "60 cm³",
    r"60\text{ sq. ft.}",
    "60 square feet",
    r"60\text{ cubic inches}",
    "60 kg",
    "60 g",
    "60 N",
    "60 J",
    r"60\text{ kg}\cdot\text{m}^2",
    r"60\text{ N}\cdot\text{m}",
    "60 °C",
    r"60^\circ\text{C}",
    r"60^\circ C",
    "60 seconds",
    "60 sec",
    "60s",
    "60 minutes",
    "60 hours",
    r"60\text{ hours}",
    "60 days",
    "60 years old",
    r"60\text{ units}",
    "60 square units",
    r"60\text{ square units}",
    r"60\text{ units}^2",
    "60 dollars",
    r"\$60",
    "60 USD",
    "60 €",
    "€60",
    "60元",
    "60 元",
    "60 米",
    "60 厘米",
    r"60\text{元}",
    r"60\text{ 元}",
    "60 cents",
    "60 people",
    r"60\text{ students}",
    r"60 \text{ ways}",
    "60 ways",
    "60 gallons",
    "60 pounds",
    "60 lbs",
    "60 ounces",
    "60 volts",
    "60 V",
    "60 Hz",
    "60 kHz",
    "60 kW",
    r"60\ \Omega",
    "60 ohms",
    "60 mol",
    "60 liters",
    "60 L",
    "60 mL",
    "60 degrees",
    r"60^\circ",
    r"60^{\circ}",
    "60 inches",
):
    ok("60", u)
no(
    "60",
    "60x",
    r"60\pi",
    r"60y^2",
    r"60\text{ or }61",
    r"60k+1",
    r"\frac{60}{h}",
    r"60 \text{ km/h}, 70 \text{ km/h}",
    r"61 km/h",
    r"6 km/h",
    r"60 a",
    r"60n",
)
# money
ok(
    r"\$5",
    "5",
    r"5\text{ dollars}",
    "5 dollars",
    r"\$5.00",
    "$5",
    "USD 5",
    "5 USD",
    r"\text{\$}5",
    r"\text{\$5}",
    r"\$ 5",
)
no(r"\$5", r"5\text{ cents}", r"\text{€}5", "€5", "£5", r"\$6", "5 cents", r"\$5\text{ million}", "5 euros", "5¢")
ok(r"\$32,\!348", "32348", r"\$32,348", "32,348", r"32{,}348", "$32,348$", r"\$32348.00", r"32\,348")
ok("5€", "€5", "5 euros", "5", r"5\text{ €}", r"5\,€")
no("5€", "$5 dollars", r"\$5")
ok(r"\$18.90", "18.90", "18.9", r"18.90\text{ dollars}", "$18.90")
no(r"\$18.90", "1890", "18.09", r"18.90\text{ cents}")
ok("5.4 \\text{ cents}", "5.4", "5.4 cents", "5.4¢", r"5.4\text{ cents}")
no("5.4 \\text{ cents}", r"\$5.4", "54", "5.4 dollars")
# layouts
LAY = [
    r"\Large 42",
    r"\underline{42}",
    r"{\Large 42}",
    r"\Large{42}",
    r"\huge 42",
    r"\large{42}",
    r"\displaystyle 42",
    r"\textstyle 42",
    r"\mathbf{42}",
    r"\bf 42",
    r"{\bf 42}",
    r"\bold{42}",
    r"\boldsymbol{42}",
    r"\textbf{42}",
    r"\textit{42}",
    r"\emph{42}",
    r"\text{42}",
    r"\mathrm{42}",
    r"\mathit{42}",
    r"\mathsf{42}",
    r"\mathtt{42}",
    r"\underline{\mathbf{42}}",
    r"\color{red}{42}",
    r"\textcolor{red}{42}",
    r"\color{blue} 42",
    r"\boxed{42}",
    r"\fbox{42}",
    r"\mathop{42}",
    r"\ensuremath{42}",
    r"\bm{42}",
    r"\;42\;",
    r"\quad 42",
    r"42\ ",
    r"42\,",
    r"\!42",
    r"~42",
    r"42 \\",
    r"\left(42\right)",
    "(42)",
    "{42}",
    "{{42}}",
    "42.",
    "42。",
    "42．",
    "42,",
    "42;",
    "42 .",
    r"42\text{.}",
    r"\text{42.}",
    r"\$42\$",
    "$42$",
    "$$42$$",
    r"\(42\)",
    r"\[42\]",
    "**42**",
    "*42*",
    "__42__",
    "`42`",
    "42.0",
    "42.00",
    "042",
    "+42",
    "４２",
    "= 42",
    "x=42",
    r"x = \mathbf{42}",
    r"\text{The answer is } 42",
    r"\text{The answer is }42.",
    r"\text{answer: }42",
    r"\text{Answer is: } 42",
    r"\text{The answer is 42}",
    r"\text{The answer is $42$}",
    r"\text{answer} = 42",
    r"\text{Answer}: 42",
    r"\text{total}=42",
    r"\text{Total: } 42",
    r"\text{Total} = 42",
    r"\text{Thus, the final answer is } 42",
    r"\text{x} = 42",
    r"\mathrm{x}=42",
    r"42 \quad",
    r"\bigl(42\bigr)",
    r"\tiny 42",
    r"\normalsize 42",
    r"\scriptstyle 42",
    r"\rm 42",
    r"\mathrm{\;42}",
    r"\underset{}{42}",
    r"\hspace{1em}42",
    r"\hspace*{2pt}42",
    r"\vspace{3mm}42",
    r"42 \hfill",
    r"\hbox{42}",
    r"\mbox{42}",
    r"\textnormal{42}",
    r"\text{ 42 }",
    r"\text {42}",
    r"{ 42 }",
    r"\textsf{42}",
    r"\texttt{42}",
    r"\text{\textbf{42}}",
    r"42\text{}",
    r"42\hphantom{x}",
    "42\u00a0",
    "\u200b42",
    "\u200942",
    r"\vphantom{\frac12}42",
    r"\strut 42",
    r"\bbox[5px]{42}",
    r"42 \blacksquare",
    r"42 \qquad\blacksquare",
    r"42\ \square",
    r"\approx 42",
    r"\therefore 42",
    r"\therefore x = 42",
    r"\Rightarrow 42",
    "42 \\checkmark",
]
for each in LAY:
    ok("42", each)
ok(
    "42",
    "42元",
    r"\text{42元}",
    "42人",
    "42个",
    r"42\text{个}",
    "答案是42",
    r"\text{答案是}42",
    r"\text{答案：}42",
    "42 руб",
    "42円",
    "42개",
)
no(
    "42",
    "42'",
    r"42\ldots",
    r"\ldots 42",
    "42...",
    "...42",
    "42…",
    "…42",
    r"42\dots",
    r"42\cdots",
    r"\dots42",
    "42''",
    r"42^\prime",
    r"42^{\prime}",
    r"42'x",
    "42!",
    "42!!",
    r"\overline{42}",
    "42_5",
    r"42_{7}",
    r"\hat{42}",
    r"42^*",
    r"42^{+}",
    r"42\%\text{ of }50",
    r"\sim 42 \text{ or } 43",
    "42?43",
    "4 2",
    "4.2",
    "-42",
    "−42",
    "–42",
    "—42",
    "42-",
    "42+",
    "42/",
    r"42\cdot",
    r"42\times 1",
    "4242",
    "420",
    r"\frac{42}{",
    "42i",
    "42x",
    "42e",
    r"42\pi",
    r"42\text{ or }43",
    r"42\text{ and }43",
    "42, 43",
    "42; 43",
    "(42, 43)",
    "42:43",
    r"42 \to 43",
    r"42\text{, no, }43",
    r"\text{not }42",
    r"\text{Not } 42",
    r"\text{The answer is not } 42",
    r"\text{The answer is } 43",
    r"\text{more than }42",
    r"\text{at least } 42",
    r"\text{at most }42",
    r"\text{about } 42 \text{ or } 43",
    r"\ne 42",
    r"\neq 42",
    "> 42",
    r"\geq 42",
    r"\le 42",
    "<42",
    "42 < x",
    r"x>42",
    r"\text{less than }42",
    r"\text{half of } 42",
    r"\text{twice } 42",
    r"\sqrt{42}",
    r"|{-42}",
    r"42 \mod 5",
    r"42 \pmod{100}",
    r"42\text{ million}",
    r"42\text{ thousand}",
    r"42\text{ hundred}",
    r"42 \text{ dozen}",
    r"\text{minus } 42",
    r"\text{negative }42",
    r"\text{The answer is } 42 \text{ or } 43",
    r"\text{A } 42 \text{ B } 43",
    r"42\text{ (not 43)}",
    r"42 \text{?}",
    r"42 \text{ is wrong}",
    "42%43",
)
ok(
    "-42",
    "−42",
    "–42",
    "- 42",
    r"\text{-42}",
    r"\text{−42}",
    r"-\mathbf{42}",
    r"\minus 42",
    "\u221242",
    r"\text{–}42",
    r"−\frac{84}{2}",
    "x = −42",
    "x=–42",
    r"(−42)",
    r"{-}42",
    r"\text{negative } 42",
    r"\text{minus }42",
    "－42",
    "﹣42",
)
no("-42", "42", "—")
ok("3-x", "3–x", "3 − x", "3-x", "-x+3")
ok("(-1, 2)", "(−1, 2)", "(–1,2)", "(–1, 2)")
ok("10-5x", "10–5x", "5(2−x)")
# primes belong to derivative names
ok("f'(x) = 2x", "f'(x)=2x", "2x", r"f^{\prime}(x)=2x")
# commas and spaces
ok(
    "1234567",
    "1,234,567",
    "1 234 567",
    r"1\,234\,567",
    r"1{,}234{,}567",
    "1234567.0",
    r"1{\,}234{\,}567",
    r"1~234~567",
    "1\u202f234\u202f567",
    "1\u00a0234\u00a0567",
    "1，234，567",
    r"1,\!234,\!567",
    r"1.234567 \times 10^6",
)
no("1234567", "1,234,56", "123,4567", "1.234.568", "1 234 56")
ok("0.5", ".5", r"\frac12", "1/2", r"50\%", "0.50", r"\frac{5}{10}", "½", "5e-1", r"5\times10^{-1}", r"2^{-1}")
ok("2.5", r"2\frac12", "2½", "5/2", r"2 \frac{1}{2}", "2 1/2", r"2\tfrac12", r"\frac52")
ok(r"1\frac{4}{5}", "9/5", "1.8", r"\frac95", "1 4/5")
ok("0.15", r"15\%", "15%", r"\frac{3}{20}", r"15 \text{ percent}", "15 percent", ".15")
ok(r"15\%", "15", "0.15", "15 %", r"15\text{ percent}", r"15\text{ \%}", r"15\,\%")
no(r"15\%", "1.5", "150", r"0.15\%", "16")
ok(
    "336^\\circ",
    "336",
    "336°",
    r"336\text{ degrees}",
    r"336^{\circ}",
    r"336\degree",
    r"336 \degree",
    r"336^{\text{o}}",
    r"336^o",
    r"336 degrees",
    r"336\,^\circ",
    r"336^\circ.",
    r"\angle A = 336^\circ",
    r"336{}^\circ",
    r"336\textdegree",
)
no("336^\\circ", r"336\text{ rad}", r"336\text{ radians}", "33.6", r"336'")
ok(r"90^\circ", "90", "90°", r"90\text{ degrees}", r"90^{\circ}")
# equations
ok("y = 2x + 3", "y=2x+3", "2x+3=y", "y = 3 + 2x", r"y-2x=3", "y = 2(x+1.5)", r"\text{y} = 2x+3", "2x+3")
no("y = 2x + 3", "y = 2x - 3", "x = 2y + 3", "y=3x+2")
ok("x=5", "5", "x = 5", "5 = x", "x=5.0", r"\text{x = 5}", "x\\,=\\,5", "5")
ok("5x - 7y + 11z + 4 = 0", "5x-7y+11z=-4", "11z - 7y + 5x + 4 = 0", "0 = 5x-7y+11z+4", "-5x+7y-11z-4=0")
no("5x - 7y + 11z + 4 = 0", "5x-7y+11z-4=0", "5x-7y+11z+4")
# matrix
ok(
    r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}",
    r"\begin{bmatrix} \frac15 \\ -\frac{18}5 \end{bmatrix}",
    r"\begin{pmatrix}0.2\\-3.6\end{pmatrix}",
    r"\left(\begin{array}{c} 1/5 \\ -18/5\end{array}\right)",
    r"\begin{pmatrix} \tfrac15 \\[2pt] -\tfrac{18}{5} \end{pmatrix}",
    r"\left[\begin{array}{c}1/5\\-18/5\end{array}\right]",
)
no(
    r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}",
    r"\begin{pmatrix} -18/5 \\ 1/5 \end{pmatrix}",
    r"\begin{pmatrix} 1/5 & -18/5 \end{pmatrix}",
)
# intervals
ok(
    r"(-\infty, 2) \cup (3, \infty)",
    r"(-\infty,2)\cup(3,+\infty)",
    r"x<2 \text{ or } x>3",
    r"(3,\infty)\cup(-\infty,2)",
    r"x \in (-\infty, 2) \cup (3, \infty)",
    "(−∞,2)∪(3,∞)",
    r"(-\infty,2)\bigcup(3,\infty)",
    r"(-\infty,2) \cup (3,\infty)",
    r"\left(-\infty,2\right)\cup\left(3,\infty\right)",
    r"x < 2 \;\text{or}\; x > 3",
    r"x<2 or x>3",
)
ok(
    "[1, 2]",
    r"1 \le x \le 2",
    r"1\leq x\leq2",
    r"\left[1,2\right]",
    r"x\in[1,2]",
    "1≤x≤2",
    r"1 \leqslant x \leqslant 2",
)
no("[1, 2]", "(1,2)", "[1,2)", r"1<x<2", r"\{1,2\}")
ok("(2,4)", r"\left(2,4\right)", "(2, 4)", "x=2, y=4", r"(x,y)=(2,4)", "(2,4)")
no("(2,4)", "(4,2)", "2", "[2,4]", "(2,4,0)")
# text
ok(
    r"\text{Evelyn}",
    "Evelyn",
    r"\textbf{Evelyn}",
    r"\text{Evelyn.}",
    r"\mathrm{Evelyn}",
    r"\text{ Evelyn }",
    r"\mathbf{Evelyn}",
    r"\textit{Evelyn}",
    r"\text{evelyn}",
)
no(r"\text{Evelyn}", "Evelin", r"\text{Carla}", r"\text{not Evelyn}")
ok(r"\text{(C)}", "C", "(C)", r"\text{C}", r"\textbf{(C)}", r"\mathrm{(C)}", r"(\text{C})", "C.", "C")
no(r"\text{(C)}", "B", r"\text{(B)}", "D", "AC", r"\text{B or C}")
ok(r"\text{east}", "east", "East", r"\text{East}", "east")
ok(r"\text{even}", "even", r"\text{Even}")
# bases
ok("52_8", "52_{8}", r"52_{\text{8}}", "52_8", r"(52)_8", "52_8", r"\text{52}_8")
no("52_8", "52_9", "42", "53_8")
ok(r"4210_{5}", "4210_5")
# misc
ok("11,\\! 111,\\! 111,\\! 100", "11111111100", "11,111,111,100")
ok(
    r"1 \pm \sqrt{19}",
    r"1+\sqrt{19}, 1-\sqrt{19}",
    r"1 \pm\sqrt{19}",
    r"x = 1\pm\sqrt{19}",
    r"\{1-\sqrt{19},1+\sqrt{19}\}",
    r"1-\sqrt{19}, 1+\sqrt{19}",
    r"1\pm √19",
)
no(r"1 \pm \sqrt{19}", r"1+\sqrt{19}", r"-1\pm\sqrt{19}", r"1\pm\sqrt{18}")
ok(
    "3, 5, 7",
    "3,5,7",
    "7, 5, 3",
    r"3, 5, \text{ and } 7",
    r"\{3,5,7\}",
    "3; 5; 7",
    r"3,\ 5,\ 7",
    r"3\text{, }5\text{, }7",
    "3, 5 and 7",
    "3、5、7",
    "3，5，7",
)
no("3, 5, 7", "3,5", "3,5,8", "357", "15", "3,5,7,9")
ok("1,-2", "-2, 1", "x=1,x=-2", "x=1 \\text{ or } x=-2", "1 and -2", "1，−2")
ok("2k+2", "2(k+1)", "2 + 2k")
no("2k+2", "2k", "2k+1", "2m+2")
ok("3R^2", "3 R^2", "3R^{2}", "3R²")
no("3R^2", "3", "3R", "R^2")
ok("5r^5", "5r^{5}", "5 r^5")
no("5r^5", "5", "5r")
ok("p - q", "-q+p", "p-q", "p–q")
no("p - q", "q-p", "p+q")
ok(
    r"\frac{270}7\text{ degrees}",
    r"\frac{270}{7}",
    r"\frac{270}{7}^\circ",
    r"38\frac47",
    "270/7",
    r"\frac{270}{7}\text{ degrees}",
)
ok(
    "864 \\mbox{ inches}^2",
    "864",
    "864 square inches",
    r"864\text{ in}^2",
    "864 in²",
    r"864\text{ sq in}",
    r"864\text{ inches}^2",
)
no("864 \\mbox{ inches}^2", "864 inches", r"864\text{ in}^3", "864 square feet", r"864\text{ cm}^2")
ok("15\\mbox{ cm}^2", "15", "15 cm^2", "15 square centimeters", r"15\,\mathrm{cm^2}", r"15\text{ cm}^{2}", "15")
no("15\\mbox{ cm}^2", "15 cm", r"15\text{ m}^2", "15 cm^3")
ok(r"\cot x", r"\frac{1}{\tan x}", r"\frac{\cos x}{\sin x}", r"\cot(x)")
ok("58,500", "58500", r"58{,}500", r"58\,500", r"\$58,500", "58 500", r"58,500\text{ people}")
ok("x \\in [-2,7]", "[-2,7]", r"-2\le x\le 7", r"[-2, 7]", r"x\in\left[-2,7\right]")
no("x \\in [-2,7]", "(-2,7)", "[-2,7)")
ok(r"\frac{3}{56}", "3/56", r"\tfrac{3}{56}", r"\frac{6}{112}", "0.053571428571")
no(r"\frac{3}{56}", "0.0536", r"\frac{56}{3}")
ok(
    ".0000672",
    r"6.72\times10^{-5}",
    "6.72e-5",
    "0.0000672",
    r"6.72 \cdot 10^{-5}",
    "6.72*10^-5",
    "6.72 x 10^{-5}",
    "6.72 × 10⁻⁵",
)
no(".0000672", "6.72", r"6.72\times10^{-4}", "0.000672")
ok("2^{10}", "1024", "2^10", "2¹⁰", "2**10", "32^2")
no("2^{10}", "20", "210")
ok("10!", "3628800", "10!")
no("10!", "10")
ok(r"\binom{5}{2}", "10", r"{5 \choose 2}", "10", r"\dbinom52", r"\binom52")
ok("x^5 - x^4 + x^3 - x^2 + x - 1", "(x-1)(x^4+x^2+1)")
ok("(a+5)(b+2)", "ab+2a+5b+10", "(b+2)(a+5)")
no("(a+5)(b+2)", "(a+2)(b+5)", "ab+10")
ok("True", "true", r"\text{True}")
no("True", "False")
ok("Yes", "yes", r"\text{Yes}", r"\text{yes.}")
no("Yes", "No")
ok("7:30", "7:30")
no("7:30", "7:31", "7.5")
# micro, a unit of the whole text, money by the hour; dashes; braces below and above
ok(r"5\ \mu\text{m}", r"5\ \mathrm{\mu m}", r"5\,\mu\mathrm{m}", "5 µm", r"5\text{ micrometers}", "5")
no(r"5\ \mu\text{m}", "5 m", "5 nm", r"5\text{ mm}", r"5\mu")
ok(r"5\text{ cm}^2", r"\text{5 cm^2}", r"\text{5 cm}^2", r"\text{5 cm²}")
no(r"5\text{ cm}^2", r"\text{5 cm^3}", r"\text{5 cm}")
ok(r"\$5\text{ per hour}", r"\$5/\text{hour}", "5 dollars per hour", "5")
no(r"\$5\text{ per hour}", "€5 per hour", r"\$5/\text{minute}", r"5\text{ dollars}")
ok("£5", r"\pounds 5", r"\textsterling5")
no("£5", r"\$5", r"\euro 5", "¥5")
ok("-42", "‐42", "‑42", "—42", "―42", "－42")
ok("42", r"\uline{42}", r"\underbrace{42}", r"\phantom{x}42")
no("42", r"\overline{42}", r"\hat{42}")
