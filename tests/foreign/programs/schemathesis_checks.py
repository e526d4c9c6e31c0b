"""What schemathesis loads beside its own checks: `positive_data_acceptance`, but for what no JSON schema can say.

Each reason for which a body that fits its schema may be refused stands here by status and code, and in the document's
own description. Anything else that is refused is a schema that lies.
"""

import json

import schemathesis
from schemathesis import Case, CheckContext, Response
from schemathesis.specs.openapi.checks import positive_data_acceptance

BEYOND_SCHEMAS = {
    (400, "invalid_combination"),  # two values that are right each by itself: lengths of lists, an order of numbers
    (400, "invalid_grammar"),  # a regular expression, schema or grammar that does not compile
    (400, "grammar_too_complex"),  # one that compiles and has too many ways on
    (400, "refused_by_template"),  # what the model's chat template raises
    (400, "context_length_exceeded"),  # tokens, and the context of the model
    (413, "out_of_pages"),  # tokens, and the memory of the server
    (400, "route_conflict"),  # `disagg_prefill_dp_rank`, and what the prefill that is asked has
    (404, "model_not_found"),  # names of models, which come and go behind a router
    (400, "previous_response_not_found"),  # names of responses that are kept
    (409, "duplicate_rid"),  # what others are asking at the same time
    (504, "deadline_exceeded"),  # a `timeout` of less than an answer takes
}


@schemathesis.check
def fitting_bodies_are_taken(ctx: CheckContext, response: Response, case: Case) -> bool | None:
    try:
        code = json.loads(response.content)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        code = ""
    if (response.status_code, code) in BEYOND_SCHEMAS:
        return None
    return positive_data_acceptance(ctx, response, case)
