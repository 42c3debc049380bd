"""Common English words, lower case and ASCII, for synthetic prompts."""

from __future__ import annotations

COMMON: tuple[str, ...] = tuple(
    """
    the of and to in is that for it as was with be by on not he his but at are this have from or
    had an they which one you were all her she there would their we him been has when who will no
    more if out so said what up its about into than them can only other new some could time these
    two may then do first any my now such like our over man me even most made
    """.split()  # noqa: SIM905 - words are easier to read without quotes
)
"""The most frequent words of English prose, short and frequent words first: tokenizers trained on
English most likely have them as single tokens."""

WORDS: tuple[str, ...] = tuple(
    """
    able about above across act action add after again age ago agree air all almost alone along
    already also always among amount angle animal answer any appear apple area arm around arrive art
    ask back bad ball bank base basket bath be bear beat beauty become bed before begin behind
    believe bell below bench bend beside best better between big bird black blood blow blue board
    boat body bone book border both bottle bottom box boy branch brave bread break breath bridge
    bright bring broad brother brown brush bucket build burn busy butter button buy cake call calm
    camp can card care carry case cat catch cause cell center chain chair chance change charge cheap
    check cheese chest chief child choice choose church circle city class clay clean clear climb
    clock close cloth cloud coal coast coat coffee cold collar color come common company complete
    condition continue cook cool copper copy cord corn corner cost cotton cough count country course
    court cover cow crack cross crowd cry cup current curtain curve cut damage dance dark daughter
    day dear decide deep degree depend desert design desk detail develop different dinner direct
    discover distance divide doctor dog door doubt down draw dream dress drink drive drop dry dust
    each ear early earth east easy eat edge effect egg eight either electric else end engine enjoy
    enough enter equal even evening event ever every example except expect explain eye face fact
    fall family famous far farm fast father favor fear feather feed feel feet fence few field fight
    figure fill final find fine finger finish fire first fish flag flame flat flight floor flow
    flower fly fold follow food foot force forest forget fork form forward four frame free fresh
    friend front fruit full future game garden gate gather general gentle get gift girl give glad
    glass glove go goat gold good govern grain grass gray great green ground group grow guess guide
    guitar hair half hall hammer hand happen happy harbor hard harm hat have head health hear heart
    heat heavy help here high hill history hold hole holiday home honest hope horn horse hospital
    hot hour house how human hundred hurry ice idea important inch include increase insect
    instrument interest invent iron island jewel job join journey joy judge jump just keep kettle
    key kick kind king kitchen knee knife knot know lady lake lamp land language large last late
    laugh law lay lead leaf learn least leather leave left leg lesson let letter level library lift
    light like limit line lip liquid list listen little live lock long look lose loud love low
    machine make man many map mark market mass match material matter may meal mean measure meat meet
    member memory metal method middle might mile milk mill million mind mine minute mirror miss mix
    modern moment money month moon more morning most mother motion mountain mouth move much muscle
    music must nail name narrow nation nature near neck need needle nerve nest net never new news
    next night nine noise north nose note nothing notice now number object ocean offer office often
    oil old once one only open operate opinion orange order other out oven over own page paint pair
    paper parcel part party pass past paste path pattern pause pay peace pen pencil people perhaps
    period person phrase picture piece pig pin pipe place plain plan plant plate play please pocket
    poem point polish poor position possible pot potato powder power practice prepare present press
    pretty price print prison private problem process produce profit promise proper proud prove
    public pull pump pupil pure push put quality question quick quiet quite race rail rain raise
    range rate ray reach read ready real reason receive record red region regret remember repeat
    reply report rest result reward rhythm rice rich ride right ring rise river road rock roll roof
    room root rough round row rule run sad safe sail salt same sand save say scale school science
    scissors sea seat second secret see seed seem sell send sense separate serious serve set seven
    shade shake shall shape share sharp sheep shelf shine ship shirt shoe shop short should shoulder
    shout show shut side sign silk silver simple since sing sister sit six size skill skin sky sleep
    slow small smell smile smoke smooth snow soap society soft soil soldier solid some son song soon
    sort sound south space spade speak special speed spell spend sponge spoon spread spring square
    stage stamp stand star start state station stay steam steel stem step stick still stone stop
    store storm story straight strange stream street strong student subject sudden sugar suggest
    summer sun supply support sure surface surprise sweet swim symbol system table tail take talk
    tall taste teach team tell ten test than thank that theory there thick thin thing think third
    this thought thousand thread through thumb thunder ticket tide time tin tired together tomorrow
    tongue tool tooth top total touch toward town trade train travel tree triangle trick trouble
    truck true trust try turn twelve twenty two type umbrella uncle under unit until up use usual
    valley value vegetable verb very view village violin visit voice vowel wait walk wall want warm
    wash watch water wave way weather week weight well west wheel when where which while whistle
    white whole wide wild will wind window wing winter wire wise wish with woman wonder wood wool
    word work world worry write wrong year yellow yesterday young
    """.split()  # noqa: SIM905 - nine hundred words are easier to read without quotes
)
