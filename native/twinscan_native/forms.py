"""The forms "native", which twinscan finds by an entry point."""

from twinscan_native import attention, linear_attention, recurrent, selective_scan

FORMS = {
    "recurrent_stack": (recurrent.FORM,),
    "attention": (attention.FORM,),
    "gated_delta_rule": (linear_attention.FORM,),
    "selective_scan": (selective_scan.FORM,),
}
