"""Words that most tokenizers for English have as single tokens."""

from __future__ import annotations

_TEXT = """
about above after again air all also always and animal answer any are around ask away back
because been before began being below between big both boy build but by call came can car
change children city close come could country cut day did different do does door down draw
each early earth eat end enough even every example eye face family far father feet few find
fire first follow food for form found four from full game gave get girl give go good great
group grow had half hand hard has have head hear help her here high him his home hot house how
idea if important into it just keep kind king know land large last late later learn leave left
letter life light like line list little live long look love low made make man many may me mean
men might mile money more morning most mother mountain move much music must my name near need
never new next night no north not notice now number of off often old on once one only open or
order other our out over own page paper part people person picture place plan plant play point
power problem product question quick rain read ready real red right river road rock room run
said same saw say school sea second see seem sentence set several she ship short should show
side simple since small so some song soon sound south stand start state stay step still stop
story strong study such sun table take talk tell ten than that the their them then there these
they thing think this those thought three through time together too took top town travel tree
true try turn two under until up us use very voice walk want war warm was watch water way we
week well went were west what wheel when where which while white who why will wind with without
wood word work world would write year you young your
"""
COMMON_WORDS = tuple(_TEXT.split())
