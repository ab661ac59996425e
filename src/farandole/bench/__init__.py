"""`farandole bench`: what farandole costs a script on this machine. Nothing on the main path imports this package."""
