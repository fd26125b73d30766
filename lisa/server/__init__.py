"""`lisa serve`: the model behind the APIs that programs already speak.

openai.py, completions.py, responses.py and anthropic.py translate between JSON and Lisa's nouns and do nothing else;
turn.py holds what they share. app.py has the routes, desk.py the way to the model and back, stream.py the bytes on the
wire, guard.py who may ask, run.py the process.
"""
